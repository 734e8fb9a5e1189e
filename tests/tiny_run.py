"""A recipe that trains in seconds, and what tests read from the folder it leaves."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from linvit.runs.folder import RunStoppedError
from linvit.runs.training import train_folder

ONE_STEP = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
TINY = {
    "seed": 3,
    "model": {"name": "ravlt_nano", "drop_path_rate": 0.2},
    "task": {"name": "classification", "label_smoothing": 0.1, "mixup": 0.2, "cutmix": 0.5, "ema_decay": 0.9},
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup_epochs": 1},
    "data": {"name": "digits", "batch_size": 16, "max_shift": 2},
    "trainer": {"max_epochs": 4, "accelerator": "cpu", "limit_train_batches": 3, "limit_val_batches": 2},
}


class At(Callback):
    """Calls `act(trainer, task)` before the batch of one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.act(trainer, pl_module)


LINVIT = (sys.executable, "-m", "linvit_cli")


def command(*arguments: object, launcher: Sequence[str] = LINVIT) -> subprocess.CompletedProcess[str]:
    """What a command of linvit, in processes of its own, ends with; its output and errors are one text."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # recipes may name `Dies`
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*launcher, *map(str, arguments)], **piped, timeout=600, env=environment)


def press_ctrl_c(trainer, task):
    os.kill(os.getpid(), signal.SIGINT)


class Dies(Callback):
    """Kills its own process, as the machine's memory guard does, before the batch of one step; for recipes."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def write_recipe(folder: Path, **groups) -> Path:
    """TINY with groups merged over it, as folder/tiny.yaml; the run goes to folder/run."""
    return write_merged(folder / "tiny.yaml", {**TINY, "folder": str(folder / "run")}, groups)


def write_merged(path: Path, values: dict, groups: dict) -> Path:
    """Writes a recipe of these values, with groups merged over them, to a folder that may be new."""
    for group, value in groups.items():
        values[group] = {**values.get(group, {}), **value} if isinstance(value, dict) else value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    return path


def content(run: Path, name: str = "last") -> dict:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


def curve(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without the column that depends on the clock."""
    with open(run / "metrics.csv") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def differing(run: Path, other: Path, fewest: int = 500) -> list[str]:
    """Which parts of weights, moving average and optimizer of the last checkpoints are not equal bit for bit."""
    ours, theirs = content(run), content(other)
    pairs = [(key, value, theirs["state_dict"][key]) for key, value in ours["state_dict"].items()]
    groups = [held["optimizer_states"][0]["param_groups"] for held in (ours, theirs)]
    states = (held["optimizer_states"][0]["state"] for held in (ours, theirs))
    for number, (one, two) in enumerate(zip(*(state.values() for state in states), strict=True)):
        pairs += [(f"{number}.{key}", one[key], two[key]) for key in one]
    assert len(pairs) >= fewest
    unequal = [name for name, one, two in pairs if not torch.equal(one, two)]
    return unequal if groups[0] == groups[1] else [*unequal, "param_groups"]


def check_resumes_bit_for_bit(recipe: Path, whole: Path, step: int, fewest: int = 500) -> None:
    """Ctrl-C before the batch of a step, then resume: the run ends as `whole`, which nobody stopped."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunStoppedError, match="`resume=True`"):
        train_folder(recipe, callbacks=[At(step, press_ctrl_c)])
    assert content(recipe.parent / "run")["global_step"] == step + 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    run = train_folder(recipe, resume=True)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert differing(run, whole, fewest) == []
    assert curve(run) == curve(whole)


def check_halves_make_a_batch(write: Callable[..., Path], folder: Path, half: int, rtol: float, atol: float, **groups):
    """In float64 without augmentation, two accumulated batches of `half` images teach what one of both does."""
    weights = []
    for name, size, batches in (("whole", 2 * half, 2), ("halves", half, 4)):
        trainer = {"precision": "64-true", "max_epochs": 1, "limit_train_batches": batches}
        trainer["accumulate_grad_batches"] = batches // 2
        data = {"max_shift": 0, "batch_size": size}
        optimizer = {"name": "sgd", "lr": 0.1}
        recipe = write(folder / name, data=data, trainer=trainer, optimizer=optimizer, **groups)
        weights.append(content(train_folder(recipe))["state_dict"])
    for name, value in weights[0].items():
        if name.startswith(("network.", "projection.")):
            torch.testing.assert_close(value, weights[1][name], rtol=rtol, atol=atol)

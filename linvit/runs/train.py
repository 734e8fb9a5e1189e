"""`linvit train`: a recipe and a folder in, checkpoints and curves out; a stopped run goes on exactly where it was."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from linvit import environment
from linvit.files import check_writable, read_checkpoint, remove_leftovers, replacing
from linvit.runs.recipe import RecipeCLI, read_recipe
from linvit.runs.screen import bars, quiet_lightning
from linvit.tasks.checkpoints import (
    LAST,
    AtomicCheckpointIO,
    RunFolder,
    RunStoppedError,
    StopSafely,
)

RECIPE, ENVIRONMENT, CURVES = "recipe.yaml", "environment.json", "curves.png"
FORMAT = 1
SAME = ("seed", "model", "task", "distillation", "data")
FREE = {"root", "num_workers", "checkpoint", "compile"}
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def train(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    prints: bool = True,
) -> Path:
    """Runs a recipe with `key.key=value` overrides and returns its folder.

    With resume, goes on from the folder's last checkpoint, bit for bit on a CPU; a folder without one starts anew, and
    one that reached the recipe's last epoch returns at once. Callbacks are Lightning's, beside our own.

    Raises ValueError with one sentence for whatever is wrong with recipe, data, model or folder, FloatingPointError
    for a loss that is no longer finite, OSError for a folder that cannot be written, ConnectionError where another
    process of the run was lost, and RunStoppedError, saying how to go on, after Ctrl-C.
    """
    values = read_recipe(recipe, overrides)
    folder = Path(values["folder"])
    last = folder / "checkpoints" / LAST
    checkpoint = _start_point(folder, last, resume)

    def prepare(cli: RecipeCLI) -> dict[str, Any]:
        if checkpoint:
            _check_same_run(checkpoint, cli.resolved(), folder)
        elif cli.config["init"]:
            line = cli.model.start_from(cli.config["init"])
            if prints and rank_zero_only.rank == 0:
                print(line, flush=True)
        shown = bars() if prints else []
        keeper = RunFolder(
            folder, _about(cli), cli.model.monitor, prints and not shown, _draws(folder), cli.model.lowest
        )
        return {
            "callbacks": [keeper, StopSafely(keeper.last), *shown, *callbacks],
            "plugins": [AtomicCheckpointIO()],
            "logger": TensorBoardLogger(folder, name=None, version="tensorboard"),
            "default_root_dir": folder,
            "enable_progress_bar": bool(shown),
            "enable_model_summary": False,
        }

    with quiet_lightning():
        cli = RecipeCLI(values, prepare)
        if rank_zero_only.rank == 0:
            check_writable(last.parent)
            remove_leftovers(folder, last.parent)
            with replacing(folder / RECIPE) as temporary:
                temporary.write_text(yaml.safe_dump(cli.resolved(), sort_keys=False, allow_unicode=True))
            environment.append(
                folder / ENVIRONMENT, environment.describe(cli.trainer.num_devices, cli.trainer.world_size)
            )
        _fit(cli, last, last if checkpoint else None)
    return folder


def _fit(cli: RecipeCLI, last: Path, start: Path | None) -> None:
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=start)
    except RunStoppedError:
        raise RunStoppedError(
            f"Stopped and saved {last} at step {cli.trainer.global_step}: the same command with --resume goes on."
        ) from None
    except SystemExit:  # what Lightning makes of a second Ctrl-C
        raise RunStoppedError(
            f"Stopped at once, without saving; the same command with --resume goes on from {last}, where that exists."
        ) from None
    except RuntimeError as error:
        if not _is_lost_process(error):
            raise
        raise ConnectionError(
            f"Another process of this run ended or cannot be reached, so process {rank_zero_only.rank} stopped too:"
            f" the same command with --resume goes on from {last if last.exists() else 'the start'}."
        ) from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise OSError(
            f"The run's folder {last.parents[1]} could not be written ({error}); its checkpoints are whole:"
            " make room or allow writing there, then go on with --resume."
        ) from error


def _is_lost_process(error: RuntimeError) -> bool:
    """Gloo has no exception of its own, only its source files' names in the text."""
    known = torch.distributed.is_available() and isinstance(error, torch.distributed.DistError)
    return known or "gloo/transport" in str(error)


def _start_point(folder: Path, last: Path, resume: bool) -> dict[str, Any] | None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"The run's folder {folder} is a file: choose another with folder=…")
    if resume:
        return read_checkpoint(last) if last.exists() else None
    if rank_zero_only.rank == 0 and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"The run's folder {folder} is not empty: go on with --resume, or choose another folder with folder=…"
        )
    return None


def _check_same_run(checkpoint: dict[str, Any], recipe: dict[str, Any], folder: Path) -> None:
    """Network, task, data and seed of a run stay; trainer, optimizer and schedule may change when it goes on."""
    about = checkpoint.get("linvit")
    if about is None:
        raise ValueError(f"{folder} was not written by `linvit train`: choose another folder with folder=…")
    for group in SAME:
        before, now = (
            {group: held} if group == "seed" else held or {} for held in (about["recipe"].get(group), recipe.get(group))
        )
        for key in sorted({*before, *now} - FREE):
            if before.get(key) != now.get(key):
                path = group if group == "seed" else f"{group}.{key}"
                raise ValueError(
                    f"The run in {folder} has {path} {before.get(key)!r}, but the recipe says {now.get(key)!r}:"
                    " change it back to go on, or choose another folder with folder=…"
                )


def _about(cli: RecipeCLI) -> dict[str, Any]:
    """What a checkpoint says of itself: enough to rebuild network, classes and preprocessing without the recipe."""
    source = cli.datamodule
    about = {
        "format": FORMAT,
        "recipe": cli.resolved(),
        "class_names": list(source.class_names),
        "preprocessing": asdict(source.preprocessing),
    }
    if hasattr(source, "annotations"):
        about["category_ids"] = list(source.annotations("train").category_ids)
    return about


def _draws(folder: Path) -> Callable[[list[dict[str, float]]], None]:
    def draw(rows: list[dict[str, float]]) -> None:
        from linvit.analysis.figures import write_training_curve  # matplotlib, which most processes never need

        with replacing(folder / CURVES) as temporary:
            write_training_curve(rows, temporary)

    return draw

"""Training: from a recipe to a run's folder with checkpoints and curves; a stopped run resumes exactly where it was."""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from linvit import environment
from linvit.analysis.run_figures import write_training_curve
from linvit.data.source import Source
from linvit.environment import replica, using_threads
from linvit.errors import SettingError, keys_of
from linvit.files import LAST, reason_of, replacing, write_text
from linvit.models.by_name import start_weights
from linvit.parallel.exchange import LostProcessError, lost_process
from linvit.ranges import Some, arguments, check, declared
from linvit.runs.evaluate import recorded
from linvit.runs.folder import (
    CURVES,
    ENVIRONMENT,
    RECIPE,
    AtomicCheckpointIO,
    RunFolder,
    RunStoppedError,
    StopSafely,
    locked_folder,
)
from linvit.runs.loading import load_run
from linvit.runs.progress import bars, quiet_lightning, say
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import Overrides, dump_yaml, publishable, read_recipe
from linvit.runs.rows import SharedRows
from linvit.runs.run import Run
from linvit.runs.stored import FORMAT, read_resumable
from linvit.runs.threads import ChoosesThreads, WatchesEpochs
from linvit.runs.trainer import lightning_refusals
from linvit.tasks.distillation import Distillation
from linvit.tasks.optimization import Optimizer, Schedule
from linvit.tasks.task import Task

logger = logging.getLogger(__name__)
ARGUMENTS = {"recipe": Path, "overrides": dict[str, Any] | Sequence[str], "folder": Path | None}
SAME = ("seed", "model", "task", "distillation", "data")
FREE = {"root", "num_workers", "checkpoint", "compile", "cpp", "recompute", "augment_on"}
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def train(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    trust_recipe: bool = False,
) -> Run:
    """Trains a network as a recipe says, and returns the run.

    Args:
        recipe: a YAML file, or the name of a bundled recipe, such as demo/ravlt_nano_digits.
        overrides: values that replace those of the recipe: {"trainer.max_epochs": 3}, or ["trainer.max_epochs=3"].
        folder: the run's folder, instead of the recipe's; by default runs/NAME.
        resume: continues from the folder's last checkpoint, bit for bit on a CPU; without a checkpoint training starts
            from the beginning, and a complete run stays as it is.
        progress: shows a bar on a terminal, otherwise a line per epoch.
        trust_recipe: lets the recipe name classes of any package, whose code then runs, and files outside the folder;
            without it, only classes of Lightning, torch, timm, torchmetrics and linvit are allowed.

    Raises ValueError, one sentence, for a mistake in recipe, data, model or folder, and for a folder in which another
    training runs; FloatingPointError for a loss that is no longer finite; OSError for a folder that cannot be written;
    ConnectionError if another process of the run was lost; RunStoppedError, saying how to continue, after Ctrl-C.
    """
    target = train_folder(recipe, overrides, folder=folder, resume=resume, progress=progress, trust_recipe=trust_recipe)
    return load_run(target)


def train_in_turn(
    recipes: Sequence[str | Path], overrides: Overrides = (), *, progress: bool = False, trust_recipe: bool = False
) -> Run:
    """Trains recipes one after the other, each from the weights of the one before, and returns the last run.

    A recipe with an `init` starts from that. Complete runs are kept, and a stopped one continues, so the same call goes
    on after an interruption.

    Args:
        recipes: YAML files or names of bundled recipes, at least one.
        overrides: for every recipe, see `train`.
        progress, trust_recipe: see `train`.

    Raises as `train`, and ValueError for recipes that share a folder.
    """
    check({"recipes": Annotated[Sequence[str | Path], Some()]}, {"recipes": recipes})
    checked = [Recipe(read_recipe(recipe, overrides), trust=trust_recipe) for recipe in recipes]
    folders = [recipe.folder for recipe in checked]
    repeated = next((folder for folder in folders if folders.count(folder) > 1), None)
    if repeated is not None:
        raise SettingError(f"Two recipes have the folder {repeated}: leave `folder` out, or set it in each of them.")
    for number, recipe in enumerate(checked):
        if number and not recipe.values["init"]:
            recipe.values["init"] = str(folders[number - 1])
        train_recipe(recipe, resume=True, progress=progress)
    return load_run(folders[-1])


def train_folder(
    recipe: str | Path,
    overrides: Overrides = (),
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    trust_recipe: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Like `train`, but returns only the run's folder. callbacks: Lightning callbacks to add."""
    check(ARGUMENTS, {"recipe": recipe, "overrides": overrides, "folder": folder})
    values = read_recipe(recipe, overrides)
    if folder is not None:
        values["folder"] = str(folder)
    checked = Recipe(values, trust=trust_recipe)
    return train_recipe(checked, resume=resume, progress=progress, callbacks=callbacks)


def train_recipe(
    recipe: Recipe, *, resume: bool = False, progress: bool = False, callbacks: Sequence[Callback] = ()
) -> Path:
    """Like `train_folder`, of a recipe that has been checked."""
    recipe.check_machine()
    target = recipe.folder
    last = target / "checkpoints" / LAST
    if target.exists() and not target.is_dir():
        raise SettingError(f"The run's folder {target} is a file: choose another `folder`.")
    first = _rank() == 0
    with locked_folder(target, resume) if first else contextlib.nullcontext(), quiet_lightning():
        stored = read_resumable(last) if resume and last.exists() else None
        recipe.settle(stored)
        values = recipe.resolved()
        task, source = recipe.build()
        if stored:
            _check_same_run(stored, recipe, target)
        elif values["init"]:
            start = start_weights(values["init"])
            names = recorded(str(start)).get("class_names")
            line = task.start_from(start, False if names and list(names) != list(source.class_names) else None)
            if progress and first:
                say(line)
        threads = values["trainer"]["threads"] or (stored or {}).get("trainer", {}).get("threads")
        with using_threads(threads or torch.get_num_threads()):
            trainer = _trainer(recipe, source, target, progress, callbacks)
            if first:
                _tell_loggers(trainer.loggers[1:], values)
                _record(recipe, target, trainer, measure=not (threads or stored))
            _fit(trainer, task, source, last, last if stored else None)
    return target


def _trainer(recipe: Recipe, source: Source, folder: Path, progress: bool, callbacks: Sequence[Callback]) -> Trainer:
    def draw(rows: list[dict[str, float]], task: Task) -> None:
        with replacing(folder / CURVES) as temporary:
            write_training_curve(rows, task.measures, temporary)

    progress_bars = bars(progress)
    facts = {  # in every checkpoint: rebuilds network, classes and preprocessing without the recipe
        "format": FORMAT,
        "recipe": recipe.resolved(),
        "class_names": list(source.class_names),
        "num_classes": source.num_classes,
        "preprocessing": asdict(source.preprocessing),
        **recipe.run_class.facts_to_store(source),
    }
    keeper = RunFolder(folder, facts, say if progress and not progress_bars else None, draw)
    number = recipe.values["processes_per_image"]
    sharing = [SharedRows(number)] if number > 1 else []
    return recipe.trainer(
        [keeper, StopSafely(keeper.last), Summary(recipe, source), *progress_bars, *sharing, *callbacks],
        plugins=[AtomicCheckpointIO()],
        logger=TensorBoardLogger(folder, name=None, version="tensorboard"),
        default_root_dir=folder,
        enable_progress_bar=bool(progress_bars),
        enable_model_summary=False,
    )


def _record(recipe: Recipe, folder: Path, trainer: Trainer, measure: bool) -> None:
    """Writes recipe and environment: now, or once the number of threads of one process on a CPU has been measured."""

    def write(number: int | None) -> None:
        recipe.values["trainer"]["threads"] = number  # in the checkpoints too
        write_text(folder / RECIPE, dump_yaml(recipe.resolved()))
        environment.append(folder / ENVIRONMENT, environment.describe(trainer.num_devices, trainer.world_size))

    if trainer.world_size > 1 or trainer.strategy.root_device.type != "cpu":
        write(recipe.values["trainer"]["threads"])
        return
    trainer.callbacks.append(WatchesEpochs())  # type: ignore[attr-defined]
    if measure and torch.get_num_threads() > 1:
        trainer.callbacks.append(ChoosesThreads(write))  # type: ignore[attr-defined]
    else:
        write(torch.get_num_threads())


def _tell_loggers(loggers: Sequence[Logger], values: Mapping[str, Any]) -> None:
    """Gives the recipe, without paths, to the loggers that it names."""
    for chosen in loggers:
        try:
            chosen.log_hyperparams(publishable(values))
        except Exception as error:  # what it raises depends on its package
            raise SettingError(f"`logger`: {type(chosen).__name__} cannot start ({reason_of(error)}).") from error


@dataclass(eq=False)
class Summary(Callback):
    """Logs network, data, length and device before the first step."""

    recipe: Recipe
    source: Source

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _rank() != 0:
            return
        task = cast(Task, pl_module)
        network, source, total = task.network, self.source, trainer.estimated_stepping_batches
        pattern = getattr(network, "pattern", None)
        size = getattr(source.preprocessing, "size", None)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        facts = (
            f"{self.recipe.run_class.title(self.recipe.values['model'], network)}"
            f"{f', pattern {pattern}' if pattern else ''}, {parameters / 1e6:.2f} million parameters",
            *_counts(trainer, source),
            f"{'×'.join(map(str, size))} px" if size else None,
            f"{total:,} steps of {source.batch_size * replica()[1] * trainer.accumulate_grad_batches}"
            f" {source.item}s, epochs: {trainer.max_epochs}",
            f"{trainer.world_size} × {trainer.strategy.root_device.type}, precision {trainer.precision}",
            f"folder {trainer.default_root_dir}",
        )
        logger.info("Training %s.", "; ".join(fact for fact in facts if fact))
        if source.num_workers:
            logger.info("Starting processes that read the data: %d.", source.num_workers)


def _counts(trainer: Trainer, source: Source) -> Iterator[str]:
    """The samples of each split that is used and whose number is known, and the classes."""
    for loaders, word in ((trainer.train_dataloader, "to train on"), (trainer.val_dataloaders, "held out")):
        with contextlib.suppress(TypeError):  # a stream does not know its length
            if loaders is not None:
                yield f"{len(loaders.dataset):,} {source.item}s {word}"
    if source.num_classes:
        yield f"{source.num_classes:,} classes"


def _fit(trainer: Trainer, task: Task, source: Source, last: Path, start: Path | None) -> None:
    again = "train again with `resume=True`"
    try:
        with (
            keys_of("data", declared(type(source)), seed="seed"),
            keys_of("task", declared(type(task))),
            keys_of("optimizer", declared(Optimizer)),
            keys_of("schedule", declared(Schedule)),
            lightning_refusals(),
        ):
            trainer.fit(task, source, ckpt_path=start)
    except RunStoppedError:
        raise RunStoppedError(f"Stopped and saved {last} at step {trainer.global_step}: {again} to continue.") from None
    except SystemExit:  # what Lightning makes of a second Ctrl-C
        raise RunStoppedError(
            f"Stopped at once, without saving: {again} to continue from {last} if it exists."
        ) from None
    except (RuntimeError, LostProcessError) as error:
        if not lost_process(error):
            raise
        raise ConnectionError(
            f"Another process of this run ended or cannot be reached, so process {_rank()} stopped too:"
            f" {again} to continue from {last if last.exists() else 'the start'}."
        ) from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise OSError(
            f"The run's folder {last.parents[1]} could not be written ({os.strerror(error.errno)}); its checkpoints are"
            f" complete: make room or allow writing there, then {again}."
        ) from error


def _rank() -> int:
    """The number of this process, which Lightning knows before its processes find each other."""
    return getattr(rank_zero_only, "rank", 0)


def _check_same_run(stored: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    """Raises ValueError if network, task, data or seed changed; trainer, optimizer and schedule may change.

    Settings of the task that are newer than the run had their defaults then.
    """
    values = recipe.resolved()
    newer = {"task": {name: p.default for name, p in arguments(recipe.run_class.task_class).items()}}
    newer["distillation"] = asdict(Distillation())
    for section in SAME:
        old, now = (
            {section: of_section} if section == "seed" else of_section or {}
            for of_section in (stored.get(section), values.get(section))
        )
        old = {key: value for key, value in newer.get(section, {}).items() if key in now} | old
        for key in sorted({*old, *now} - FREE):
            if old.get(key) != now.get(key):
                path = section if section == "seed" else f"{section}.{key}"
                raise SettingError(
                    f"The run in {folder} has {path} {old.get(key)!r}, but the recipe says {now.get(key)!r}: change"
                    " it back to resume, or choose another `folder`."
                )

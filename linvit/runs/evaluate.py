"""Evaluation: whether data fit a network, and the task's measures over all held-out samples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from safetensors import SafetensorError, safe_open
from timm.layers import PatchEmbed
from torch import nn

from linvit.data.images.image import Preprocessing
from linvit.data.source import Source, listed
from linvit.errors import SettingError, refuse
from linvit.files import read_checkpoint, weights_file
from linvit.ranges import allows
from linvit.runs.progress import bars, quiet_lightning
from linvit.runs.trained import Trained
from linvit.tasks.measures import AVERAGED, Measure


class Measures(Mapping[str, float]):
    """Measures by name, shares in 0..1, and the number of samples.

    These are the measures of `run.network`, the moving average if there is one; `by_weights` has those of "raw" and
    "ema". `declared` contains the heading and unit of each.
    """

    def __init__(self, by_weights: dict[str, dict[str, float]], declared: Mapping[str, Measure]) -> None:
        self.by_weights = by_weights
        self.declared = declared

    def __getitem__(self, name: str) -> float:
        return list(self.by_weights.values())[-1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.by_weights.values())[-1])

    def __len__(self) -> int:
        return len(list(self.by_weights.values())[-1])

    def __repr__(self) -> str:
        return f"Measures({', '.join(f'{name}={value:.6g}' for name, value in self.items())})"

    def table(self) -> list[dict[str, str]]:
        """One row per kind of weights, formatted for people; only two kinds are named."""
        words = {"raw": "raw", "ema": "moving average"}
        return [
            ({"weights": words[weights]} if len(self.by_weights) > 1 else {})
            | {self.declared[name].heading: self.declared[name].cell(row[name]) for name in row}
            for weights, row in self.by_weights.items()
        ]


class HarnessMeasures(dict[str, dict[str, Any]]):
    """Measures by task of lm-evaluation-harness, with its names.

    Also "items", their number, and "chance", the accuracy of guessing.

    chance is the mean of one over the number of choices, None for tasks without choices.
    """

    @property
    def by_weights(self) -> dict[str, dict[str, Any]]:
        """The measures themselves, which are of one kind of weights."""
        return dict(self)

    def table(self) -> list[dict[str, str]]:
        """One row per measure, formatted for people."""
        return [
            {
                "task": task,
                "measure": name.replace(",none", "").replace(",", " "),
                "value": f"{value:.4f}",
                "chance": f"{measures['chance']:.4f}" if name.startswith("acc") and measures["chance"] else "–",
                "items": f"{measures['items']:,}" if measures["items"] else "–",  # none of a group of tasks
            }
            for task, measures in self.items()
            for name, value in measures.items()
            if isinstance(value, float) and "_stderr" not in name and name != "chance"
        ]


def evaluate(run: Trained, source: Source, progress: bool = False, **trainer: Any) -> Measures:
    """Measures a run on the held-out samples of a source; trainer: further arguments of Lightning's Trainer."""
    progress_bars = bars(progress)
    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": bool(progress_bars),
        "callbacks": [*progress_bars, *trainer.pop("callbacks", ())],
        "use_distributed_sampler": False,
        "default_root_dir": run.folder,  # keeps the classifier that measures generated images
    }
    with quiet_lightning():
        logged = Trainer(**settings | trainer).validate(run.task, datamodule=source, verbose=False)
    if not logged:
        raise SettingError(f"The data of {run.path} has no validation samples: set `data` to other data.")
    values = {key.removeprefix("val/"): value for key, value in logged[0].items()}
    counted = {run.task.counted: round(values.pop(run.task.counted))}
    averaged = {key.removeprefix(AVERAGED): value for key, value in values.items() if key.startswith(AVERAGED)}
    raw = {key: value for key, value in values.items() if not key.startswith(AVERAGED)}
    by_weights = {"raw": raw | counted} | ({"ema": averaged | counted} if averaged else {})
    return Measures(by_weights, run.task.measures)


def prepared_for(run: Trained, source: Source, changes: dict[str, Any]) -> Source:
    """Gives the source the run's preprocessing, except for the settings in `changes`, and returns it."""
    if "channels" in changes and source.channels != run.preprocessing.channels:
        raise SettingError(
            f"`channels` is {source.channels}, but the network expects {run.preprocessing.channels}: leave it out."
        )
    names = {field.name for field in fields(run.preprocessing)} & changes.keys()
    values = {name: getattr(source.preprocessing, name) for name in names}
    source.preprocessing = replace(run.preprocessing, **values)
    check_size(run.network, source, "network")
    return source


def check_size(network: nn.Module, source: Source, owner: str) -> None:
    """Raises ValueError if a network takes images of one size only, and those of the source have another."""
    preprocessing = source.preprocessing
    if not isinstance(preprocessing, Preprocessing) or preprocessing.resize != "crop":
        return
    for module in network.modules():
        if (
            isinstance(module, PatchEmbed)
            and module.strict_img_size
            and module.img_size not in (None, preprocessing.size)
        ):
            of_data, taken = (f"{height}×{width}" for height, width in (preprocessing.size, module.img_size))
            raise SettingError(
                f"`size` is {of_data} px, but the {owner} takes {taken}: set it to that, or create the {owner} with"
                f" img_size={list(preprocessing.size)} or dynamic_img_size=true."
            )


def recorded(weights: str) -> Mapping[str, Any]:
    """What a run's checkpoint, or the file of weights that linvit wrote, says about its data; nothing for others."""
    path = weights_file(weights)
    if path.suffix == ".safetensors" and path.is_file():
        return _header(path)
    content = read_checkpoint(path) if path.is_file() else {}
    stored = content.get("linvit")
    return stored if isinstance(stored, Mapping) else {}


def _header(path: Path) -> Mapping[str, Any]:
    """The class names and preprocessing in the header of a .safetensors file, see `weight_file.header`."""
    kinds = {"class_names": list[str], "preprocessing": dict[str, Any]}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        about = {key: json.loads(metadata[key]) for key in kinds if key in metadata}
    except (SafetensorError, ValueError, OSError):  # the weights are refused, or are not ours
        return {}
    return {key: value for key, value in about.items() if allows(kinds[key], value)}


def check_teacher(weights: str, source: Source) -> None:
    """Raises ValueError if a teacher's run has other classes or another normalization than the data."""
    stored = recorded(weights)
    names: Any = stored.get("class_names")
    expected: Any = source.class_names
    refuse(
        bool(names and expected)
        and list(names) != list(expected)
        and f"The teacher in {weights} predicts the classes {listed(names)}, but the data has {listed(expected)}: give"
        " a teacher with these classes in this order."
    )
    for name in ("mean", "std"):
        taught: Any = stored.get("preprocessing", {}).get(name)
        now: Any = getattr(source.preprocessing, name, None)
        refuse(
            None not in (taught, now)
            and list(taught) != list(now)
            and f"`{name}` is {list(now)}, but the teacher in {weights} was trained with {list(taught)}: use the"
            " teacher's."
        )

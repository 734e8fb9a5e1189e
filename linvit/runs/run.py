"""A run: a network with its weights, and everything known about how it was trained."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from linvit.data.source import Source
from linvit.models.by_name import bundled_weights
from linvit.ranges import Count, check
from linvit.runs.evaluate import Measures
from linvit.runs.folder import read_curves
from linvit.runs.rows import SharedRows, check_sharing, in_processes
from linvit.runs.settings import as_tuple, parameters
from linvit.runs.spec import TaskSpec, check_options
from linvit.runs.stored import check_preprocessing
from linvit.tasks.task import Task

WEIGHTS = {"raw": "raw weights", "ema": "moving average"}


@dataclass(repr=False)
class Run:
    """A trained network with its task, class names, preprocessing and recipe.

    path: the checkpoint or weight file; None for random weights. recipe: all values of the run's recipe; None for
    weights without one. name: the network's name in tables and reports. stored: further facts about the data from the
    checkpoint, such as the category ids of a detector.

    Its methods depend on the task, see the files in `linvit.runs.tasks`.
    """

    spec: TaskSpec
    task: Task
    class_names: list[str]
    preprocessing: Any
    path: Path | None
    name: str
    recipe: dict[str, Any] | None = None
    stored: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, task={self.spec.name!r}, {len(self.class_names)} classes, path={str(self.path)!r})"

    @property
    def folder(self) -> Path:
        """The run's folder, or the folder of the weight file; below runs/ without a file and for one in the package."""
        if self.path is None:
            return Path("runs") / "untrained" / self.name.replace("/", "_")
        if self.path == bundled_weights(self.name):
            return Path("runs") / self.name
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else self.path.parent

    @property
    def network(self) -> nn.Module:
        """The network in evaluation mode, with the moving average of its weights if there is one."""
        return list(self.task.networks().values())[-1].eval()

    @property
    def weights(self) -> str:
        """Which weights `network` has, in words."""
        if self.path is None:
            return "random weights"
        return WEIGHTS[list(self.task.networks())[-1]]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The training curves, one row per epoch; empty if the folder has no metrics.csv."""
        return [] if self.path is None else read_curves(self.folder)

    def placed_network(self, weights: str | None = None) -> tuple[nn.Module, torch.device]:
        """The network with "raw" or "ema" weights (default: as `network`), on the GPU if there is one, and its device.

        Raises ValueError for weights that the checkpoint does not have.
        """
        networks = self.task.networks()
        if weights is not None and weights not in networks:
            raise ValueError(
                f"`weights` is {weights!r}, but the checkpoint contains {' and '.join(networks)}: choose one."
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network = self.network if weights is None else networks[weights]
        return network.to(device).eval(), device

    def source(self, data: str | Path | None = None, **overrides: Any) -> Source:
        """The data to evaluate on: by default the run's own, with these settings changed.

        Args:
            data: a folder, or the name of a source such as "digits"; default: the data of the run.
            overrides: settings of the source, as in the group `data` of a recipe: root, batch_size, num_workers, …

        Raises ValueError if no data is known, a setting is unknown, or the data does not fit the network.
        """
        stored = dict((self.recipe or {}).get("data") or {})
        trained_on = stored.pop("name", None)
        if data is not None:
            overrides = {("name" if str(data) in self.spec.sources else "root"): str(data), **overrides}
        name = overrides.pop("name", None) or self._source_name(trained_on, overrides)
        if name is None:
            raise ValueError("This network comes without data: set `data` to a folder, or to a name such as digits.")
        return self.spec.open_source(self, name, stored if name == trained_on else {}, overrides)

    def _source_name(self, stored: str | None, overrides: Mapping[str, Any]) -> str | None:
        """The stored source, or the task's folder source if a folder is given that the stored source cannot read."""
        if "root" in overrides and (stored is None or "root" not in parameters(self.spec.sources[stored])):
            return self.spec.folder_source
        return stored

    def evaluate(
        self,
        data: str | Path | None = None,
        progress: bool = False,
        trainer: Mapping[str, Any] | None = None,
        processes: int = 1,
        **overrides: Any,
    ) -> Measures:
        """The measures of the task over all held-out samples, see `linvit.runs.evaluate.evaluate`.

        Args:
            data, overrides: see `source`; also the task's own options (speech: beam, language_model, …; language:
                tasks, include, limit).
            progress: show a progress bar in the terminal.
            trainer: arguments of Lightning's Trainer, such as devices and precision.
            processes: number of processes that are started to share the rows of every image, see `linvit.parallel`;
                for classification.
        """
        check({"processes": Count}, {"processes": processes})
        if processes > 1:
            check_sharing("processes", self.spec.name)
            return in_processes(processes, _evaluate_sharing_rows, self, data, progress, trainer, overrides)
        measures: Measures = self.spec.evaluate(self, data, progress, trainer or {}, **overrides)
        return measures

    def predict(self, inputs: Any, **options: Any) -> Any:
        """Predictions for files, folders, or images and audio in memory, with `to_csv`, `to_json` and `save`.

        Args:
            inputs: a path, or a sequence of paths, PIL images or arrays (uint8, height × width × 3); for speech
                recognition, paths or arrays of samples.
            options: weights ("raw" or "ema", by default the moving average if there is one), output (a file or
                folder to save them to), progress (show a progress bar), and those of the task, see `predict` in its
                file in `linvit.runs.tasks`. For classes and label maps also strips: a dictionary, even an empty one,
                reads every image at its own size and strip by strip, on the CPU; its entries are rows, memory, spill
                and progress of `linvit.stream`.

        Raises ValueError if the inputs contain nothing to predict, or the task does not have an option. Files that
        cannot be read are listed in `unreadable` of the result.
        """
        single = isinstance(inputs, str | Path) or not isinstance(inputs, Sequence | Iterable)
        check_options(self.spec.predict, self.spec.name, options)
        return self.spec.predict(self, [inputs] if single or hasattr(inputs, "shape") else list(inputs), **options)

    def prepare(self, **settings: Any) -> None:
        """Changes the preprocessing of all later inputs: size, crop_pct, mean …

        Raises ValueError for an unknown field, or a value out of range.
        """
        if isinstance(settings.get("size"), int):
            settings["size"] = (settings["size"],) * 2
        check_preprocessing(self.spec, settings)
        for name in {"mean", "std"} & settings.keys():
            count = len(getattr(self.preprocessing, name))
            if settings[name] is None or len(settings[name]) != count:
                raise ValueError(f"`{name}` is {settings[name]}, expected {count} numbers, one per channel: change it.")
        self.preprocessing = replace(self.preprocessing, **{key: as_tuple(value) for key, value in settings.items()})

    def stream(self, inputs: Sequence[Any], seconds: float, **options: Any) -> Iterator[str]:
        """The transcript of an audio file by a causal network, piece by piece, each of this many seconds."""
        return self.spec.stream(self, inputs, seconds, **options)

    def transcriber(self, weights: str | None = None) -> Any:
        """A `linvit.runs.tasks.speech.Transcriber`, which transcribes audio as it arrives; for causal networks."""
        return self.spec.transcriber(self, weights)

    def generate(self, **options: Any) -> Any:
        """Generated text or images; for the options see `generate` in the task's file in `linvit.runs.tasks`."""
        check_options(self.spec.generate, self.spec.name, options)
        return self.spec.generate(self, **options)

    def analyze(self, what: str = "all", **options: Any) -> Any:
        """Ranks, scores and magnitudes inside the attention, see `linvit.runs.analyze.analyze`."""
        from linvit.runs.analyze import analyze

        return analyze(self, what, **options)

    def export(self, path: str | Path, **options: Any) -> Any:
        """Writes the network to a file of another runtime, see `linvit.runs.exporting.export`."""
        from linvit.runs.exporting import export

        return export(self, path, **options)

    def save_weights(self, path: str | Path, **options: Any) -> Path:
        """Writes weights that timm reads, with a model card, see `linvit.runs.weight_file.save_weights`."""
        from linvit.runs.weight_file import save_weights

        return save_weights(self, path, **options)

    def report(
        self,
        path: str | Path | None = None,
        measures: Measures | None = None,
        data: str | Path | None = None,
        **overrides: Any,
    ) -> Path:
        """Writes a self-contained HTML report (default: report.html in the run's folder) and returns its path.

        measures: the result of `evaluate` on the same data; computed here if it is not given.
        """
        from linvit.runs.report import write_report

        return write_report(self, path, measures, data, **overrides)


def _evaluate_sharing_rows(
    mesh: DeviceMesh,
    run: Run,
    data: str | Path | None,
    progress: bool,
    trainer: Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
) -> Measures:
    settings = {**(trainer or {}), "callbacks": [SharedRows(mesh.size(), mesh)]}
    return run.evaluate(data, progress and mesh.get_local_rank() == 0, settings, **overrides)

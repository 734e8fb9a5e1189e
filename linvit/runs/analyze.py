"""Ranks, score matrices and the query's magnitude inside a network's attention, as figures, tables and a report."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis import attention_figures as draw
from linvit.analysis.figures import write_figure
from linvit.analysis.magnitude import SORTED, compare_readouts, measure_magnitude
from linvit.analysis.measured import Measured, rows
from linvit.analysis.probe import attention_layers, probe, unseen_attention
from linvit.analysis.rank import SPECTRUM, measure_ranks
from linvit.analysis.report import PAGE, paragraph, svg_image, table, write_page
from linvit.analysis.scores import measure_scores, score_maps
from linvit.data.images.image import Preprocessing, Side
from linvit.errors import SettingError, refuse
from linvit.files import check_writable, user_path, write_csv, write_json
from linvit.layers.operator import NO_SCORES, AttentionLayer
from linvit.ranges import Count, Share, check, checked
from linvit.runs.images import AnalyzedImages, as_list, from_files, from_photos, from_source
from linvit.runs.progress import tracked
from linvit.runs.run import Run
from linvit.runs.trained import Trained

SCORE_IMAGES, SHOWN, MAGNITUDE_IMAGES = 8, 4, 4
BATCH = 4


@dataclass(frozen=True)
class Subject:
    """The subject of an analysis.

    network: has attention over images. inputs: makes its inputs from normalized images and labels (None if unknown).
    displayed: turns an image into (height, width, 3) or (height, width) in 0..1. transform: from an image file to a
    normalized image; None if only the data of the run can be used. note: follows the network's name in the report.
    """

    network: nn.Module
    inputs: Callable[[Tensor, Tensor | None], Any]
    displayed: Callable[[Tensor], Tensor]
    transform: Callable[[Any], Tensor] | None
    note: str = ""


@dataclass(frozen=True)
class Analysis:
    """The result: the report's path, rows of numbers and figures by name, and a sentence for each unreadable file."""

    page: Path
    rows: dict[str, list[dict[str, object]]]
    figures: dict[str, Figure]
    unreadable: list[str]


@dataclass(frozen=True)
class _View:
    """The input: a subject, images, names of layers, and the position of the query, (height, width) in 0..1."""

    subject: Subject
    images: AnalyzedImages
    layers: list[str]
    query: tuple[float, float]
    progress: bool

    def batches(self, count: int | None, name: str) -> Iterator[Any]:
        """Batches of network inputs for the first images."""
        labels = self.images.many_labels
        inputs = self.subject.inputs(self.images.many[:count], None if labels is None else labels[:count])
        columns = [column.split(BATCH) for column in (inputs if isinstance(inputs, tuple) else (inputs,))]
        for batch in tracked(list(zip(*columns, strict=True)), name, progress=self.progress):
            yield batch if len(batch) > 1 else batch[0]


@dataclass(frozen=True)
class _Result:
    """One analysis: rows of numbers, curves too long for rows, and figures with captions by file name."""

    title: str
    rows: list[dict[str, object]]
    curves: list[dict[str, object]]
    figures: dict[str, tuple[Figure, str]]


class ImageRun(Run):
    """A run of a network with attention over images: a classifier, detector, segmentor or image generator."""

    def subject(self) -> Subject:
        """What `analyze` looks into."""
        raise NotImplementedError

    @checked
    def analyze(
        self,
        what: str = "all",
        *,
        images: Sequence[Any] | str | Path | None = None,
        output: str | Path | None = None,
        layers: Sequence[str | int] | None = None,
        count: Count = 64,
        query: tuple[Share, Share] = (0.5, 0.5),
        progress: bool = False,
        **overrides: Any,
    ) -> Analysis:
        """Analyzes the attention and writes figures (PNG, SVG), numbers (CSV, JSON) and a report to a folder.

        Args:
            what: a name in ANALYSES, or "all", which is "rank" alone where a layer has no matrix of scores.
            images: image files, folders or images in memory; default: the run's held-out data, or two photos if the
                run has no data.
            output: the folder; default: analysis/ in the run's folder.
            layers: names of attention layers, or their numbers from 1 (default: all).
            count: number of images over which ranks are averaged.
            query: (height, width) in 0..1 of the query whose scores are shown.
            progress: show progress bars.
            overrides: settings of the data, see `source`; with `images`, only `size`, and only of classifiers.
        """
        if what not in ("all", *ANALYSES):
            raise SettingError.of("what", what, f"one of {', '.join(ANALYSES)} or all", "choose one of them")
        self.task.cpu()
        subject = self.subject()
        chosen = resolve_layers(subject.network, layers)
        folder = user_path(output) if output else self.folder / "analysis"
        check_writable(folder)
        view = _View(subject, self._images(subject, images, count, overrides), chosen, (query[0], query[1]), progress)
        results = {}
        for name in _possible(subject.network, chosen) if what == "all" else (what,):
            result = results[name] = ANALYSES[name](view)
            for file, (figure, _) in result.figures.items():
                write_figure(figure, folder / file)
            write_csv(folder / f"{name}.csv", result.rows)
            write_json(folder / f"{name}.json", {"rows": result.rows, "curves": result.curves})
        _write_page(folder / PAGE, self, view, results)
        figures = {file: figure for result in results.values() for file, (figure, _) in result.figures.items()}
        rows_by_name = {name: result.rows for name, result in results.items()}
        return Analysis(folder / PAGE, rows_by_name, figures, view.images.unreadable)

    def _images(self, subject: Subject, images: Any, count: int, overrides: dict[str, Any]) -> AnalyzedImages:
        if images is None and (self.recipe or overrides):
            return from_source(self.source(**overrides), count, SHOWN)
        reads, transform = self.preprocessing, subject.transform
        if overrides.keys() == {"size"} and isinstance(reads, Preprocessing):
            size = overrides.pop("size")
            check({"size": Side | tuple[Side, Side]}, {"size": size})
            transform = replace(reads, size=(size, size) if isinstance(size, int) else tuple(size)).transform()
        setting = next(iter(overrides), None)
        refuse(
            setting is not None
            and f"`{setting}` is a setting of the data, but `images` are given, and of these settings only the `size`"
            " of a classifier's images applies to them: leave one of them out.",
            subject.transform is None and "Image generators are analyzed on the data of their run: leave `images` out.",
        )
        assert transform is not None
        if images is None:
            return from_photos(transform, reads.channels, count, SHOWN)
        return from_files(as_list(images), transform, reads.channels, count, SHOWN)


def resolve_layers(network: nn.Module, layers: Sequence[str | int] | None) -> list[str]:
    """Resolves names and numbers (from 1) to names of attention layers, in the network's order."""
    names = attention_layers(network)
    chosen = set(names if layers is None else ())
    for layer in map(str, layers or ()):
        number = int(layer) if layer.isdecimal() else 0
        if layer not in names and not 1 <= number <= len(names):
            raise ValueError(
                f"There is no attention layer {layer!r}: give numbers from 1 to {len(names)}, or names such as"
                f" {names[0]} or {names[-1]}."
            )
        chosen.add(layer if layer in names else names[number - 1])
    return [name for name in names if name in chosen]


def _possible(network: nn.Module, layers: Sequence[str]) -> Sequence[str]:
    """The names of the analyses of these layers, of which a nonlinear read has only one."""
    modules = [network.get_submodule(layer) for layer in layers]
    nonlinear = any(isinstance(module, AttentionLayer) and module.operator.nonlinear for module in modules)
    return ("rank",) if nonlinear else tuple(ANALYSES)


def _rank(view: _View) -> _Result:
    measured = measure_ranks(view.subject.network, view.batches(None, "rank"), view.layers)
    figures = {
        "rank": (draw.rank_figure(_some(measured)), draw.ABOUT_RANK),
        "spectrum": (draw.spectrum_figure(measured), draw.ABOUT_SPECTRUM),
    }
    return _Result("Rank", rows(measured), _curves(measured, SPECTRUM), figures)


def _scores(view: _View) -> _Result:
    network, whole = view.subject.network, view.images.whole
    measured = _some(measure_scores(network, view.batches(SCORE_IMAGES, "scores"), view.layers))
    maps = score_maps(network, view.subject.inputs(whole, view.images.whole_labels), view.query, view.layers)
    pictures = [view.subject.displayed(image) for image in whole]
    figures = {
        "score_maps": (draw.score_map_figure(pictures, maps, view.query), draw.ABOUT_SCORE_MAPS),
        "scores": (draw.score_measure_figure(measured), draw.ABOUT_SCORES),
    }
    curves = [
        {
            "layer": score_map.layer.name,
            "mechanism": score_map.layer.mechanism,
            "image": number,
            "query": score_map.token,
            "scores": score_map.scores.tolist(),
        }
        for number, maps_of_image in enumerate(maps)
        for score_map in maps_of_image
    ]
    return _Result("Scores", rows(measured), curves, figures)


def _magnitude(view: _View) -> _Result:
    network = view.subject.network
    measured = _some(measure_magnitude(network, view.batches(MAGNITUDE_IMAGES, "magnitude"), view.layers))
    tokens = {layer.name: layer.grid[0] * layer.grid[1] for layer in draw.layers_of(measured)}
    largest = [name for name, count in tokens.items() if count == max(tokens.values())]
    middle = largest[len(largest) // 2]
    (layer,) = probe(network, next(view.batches(MAGNITUDE_IMAGES, "magnitude")), [middle])
    readouts = compare_readouts(layer)
    figures = {
        "readouts": (draw.readout_figure(readouts), draw.ABOUT_READOUTS.format(layer=middle)),
        "magnitude": (draw.magnitude_figure(measured), draw.ABOUT_MAGNITUDE),
    }
    numbers = [{"readout": "of the layer", **row} for row in rows(measured)] + rows(readouts)
    return _Result("Magnitude", numbers, _curves(readouts, SORTED), figures)


ANALYSES: dict[str, Callable[[_View], _Result]] = {"rank": _rank, "scores": _scores, "magnitude": _magnitude}


def _some(measured: list[Measured]) -> list[Measured]:
    if not measured:
        raise SettingError(
            "Every chosen attention layer has a single token, so there is nothing to measure: give larger images, or"
            " choose other `layers`."
        )
    return measured


def _curves(measured: Sequence[Measured], measure: str) -> list[dict[str, object]]:
    return [
        {
            "layer": entry.layer.name,
            "mechanism": entry.layer.mechanism,
            **entry.condition,
            measure: entry.mean(measure).tolist(),
        }
        for entry in measured
    ]


def _write_page(path: Path, run: Trained, view: _View, results: dict[str, _Result]) -> None:
    network, images = view.subject.network, view.images
    height, width = images.many.shape[-2:]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    weights = "random weights, never trained (seed 0)" if run.path is None else f"weights from {run.path}"
    average = " (moving average)" if "ema" in run.task.networks() else ""
    summary = (
        f"{run.name}{view.subject.note}, {parameters:,} parameters, {weights}{average}; {height}×{width} px. Images:"
        f" {images.about} Scores: the first {min(SCORE_IMAGES, len(images.many))} of these; magnitude: the first"
        f" {min(MAGNITUDE_IMAGES, len(images.many))}."
    )
    if unseen := unseen_attention(network):
        summary += f" Not analyzed, attention of other kinds: {', '.join(unseen)}."
    if "scores" not in _possible(network, view.layers):
        summary += f" No scores and no magnitude: {NO_SCORES}."
    sections: list[tuple[str, Sequence[str]]] = [
        ("Network and images", [paragraph(summary), table(_layer_table(view))])
    ]
    for result in results.values():
        parts = []
        for file, (_, caption) in result.figures.items():
            image = (path.parent / f"{file}.svg").read_text(encoding="utf-8")
            parts += [svg_image(image, file.replace("_", " ")), paragraph(" ".join(caption.split()))]
        sections.append((result.title, parts))
    files = ", ".join(f"{name}.csv, {name}.json" for name in results)
    sections.append(("Numbers", [paragraph(f"The numbers of all figures are in files next to this page: {files}.")]))
    write_page(path, f"Attention of {run.name}, run {run.folder.resolve().name}", sections)


def _layer_table(view: _View) -> list[dict[str, Any]]:
    names = attention_layers(view.subject.network)
    return [
        {
            "number": names.index(layer.name) + 1,
            "layer": layer.name,
            "mechanism": layer.mechanism,
            "tokens": f"{layer.grid[0]}×{layer.grid[1]}" + (f" + {layer.num_prefix}" if layer.num_prefix else ""),
            "heads": layer.outputs().shape[1],
            "head width": layer.outputs().shape[-1],
            "rotation": "yes" if layer.operands.rotary is not None else "no",
        }
        for layer in probe(view.subject.network, next(view.batches(1, "layers")), view.layers)
    ]

"""`linvit analyze`: ranks, score matrices and the query's magnitude of a network, as figures, tables and one page."""

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from matplotlib.figure import Figure
from rich.progress import track
from timm.data import resolve_data_config
from timm.models import load_state_dict
from torch import Tensor, nn

from linvit.analysis import attention_figures as draw
from linvit.analysis.figures import write_figure
from linvit.analysis.magnitude import SORTED, compare_readouts, measure_magnitude
from linvit.analysis.measured import Layer, Measured, rows
from linvit.analysis.probe import attention_layers, probe, unseen_attention
from linvit.analysis.rank import SPECTRUM, measure_ranks
from linvit.analysis.report import drawn, paragraph, table, write_page
from linvit.analysis.scores import measure_scores, score_maps
from linvit.data import Preprocessing, Source
from linvit.files import check_writable, read_checkpoint, replacing, write_json
from linvit.models.by_name import check_model
from linvit.runs import analyze_words as words
from linvit.runs.analyzed_images import Pictures, from_files, from_photos, from_source
from linvit.runs.restore import restore, source_for

PAGE = "report.html"
SEED = 0
IMAGES, SCORE_IMAGES, SHOWN = 64, 8, 4
MAGNITUDE_IMAGES = 4
BATCH = 4


@dataclass(frozen=True)
class Subject:
    """A network to be looked at: its name, a sentence on its weights, its input, held-out data where it has some."""

    network: nn.Module
    name: str
    weights: str
    preprocessing: Preprocessing
    source: Source | None
    folder: Path


@dataclass(frozen=True)
class View:
    """What is looked at: images, names of layers, and the query's point, (height, width) in 0..1, whose scores show."""

    pictures: Pictures
    layers: list[str]
    point: tuple[float, float]


@dataclass(frozen=True)
class Finding:
    """One analysis: its numbers, one row each, curves too long for rows, figures by file name, and words on them."""

    title: str
    rows: list[dict[str, object]]
    curves: list[dict[str, object]]
    figures: dict[str, tuple[Figure, str]]


def analyze(
    what: str,
    run: str | None,
    model: str | None,
    checkpoint: str | None,
    images: Sequence[str] | None = None,
    output: str | None = None,
    layers: Sequence[str] | None = None,
    count: int = IMAGES,
    point: tuple[float, float] = (0.5, 0.5),
) -> tuple[Path, list[str]]:
    """Looks at a network and writes figures (PNG, SVG), numbers (CSV, JSON) and a page into a folder.

    Args:
        what: a name in ANALYSES, or "all".
        run: a run's folder or a checkpoint of it; else model, with a checkpoint or with random weights.
        images: image files and folders; by default the run's held-out data, or two photos where there is none.
        output: the folder; by default RUN/analysis, or runs/analysis/MODEL.
        layers: names of attention layers, or their numbers from 1; all by default.
        count: how many images ranks are averaged over.
        point: (height, width) in 0..1 of the query whose scores are drawn.

    Returns:
        The page, and a sentence for each image file that was left out.

    Raises:
        ValueError: for anything of these that does not exist or fit together.
    """
    if count < 1:
        raise ValueError(f"--count is {count}, but at least one image has to be looked at: set it to 1 or more.")
    if not all(0 <= share <= 1 for share in point):
        raise ValueError(f"--query is {point[0]:g} {point[1]:g}, expected height and width as shares from 0 to 1.")
    subject = read_subject(run, model, checkpoint)
    chosen = resolve_layers(subject.network, layers)
    folder = Path(output) if output else subject.folder
    check_writable(folder)
    view = View(_pictures(subject, images, count), chosen, point)
    found = {}
    for name in ANALYSES if what == "all" else (what,):
        found[name] = ANALYSES[name](subject, view)
        _write_finding(folder, name, found[name])
    _write_page(folder / PAGE, subject, view, found)
    return folder / PAGE, view.pictures.complaints


def read_subject(run: str | None, model: str | None, checkpoint: str | None) -> Subject:
    """The network of a run, of a checkpoint, or of a registered name with given or random weights.

    Raises:
        ValueError: as `restore`, and for a checkpoint that does not fit.
    """
    if model is not None and checkpoint is None and run is None:
        return _untrained(model)
    if model is not None and run is None and not _reads_released(model):
        return _timm_weights(model, str(checkpoint))
    restored = restore(run, model, checkpoint)
    name = model or restored.title
    source = source_for(restored, None) if restored.data else None
    average = " (moving average)" if "ema" in restored.task.networks() else ""
    told = f"weights from {restored.path}{average}"
    return Subject(restored.judged, name, told, restored.preprocessing, source, restored.folder / "analysis")


def resolve_layers(network: nn.Module, layers: Sequence[str] | None) -> list[str]:
    """Names of attention layers from names and numbers (from 1), in the network's order.

    Raises:
        ValueError: for a network without such layers, and for a name or number that is none of them.
    """
    known = attention_layers(network)
    chosen = set(known if layers is None else ())
    for layer in layers or ():
        number = int(layer) if layer.isdecimal() else 0
        if layer not in known and not 1 <= number <= len(known):
            raise ValueError(
                f"There is no attention layer {layer!r}: give numbers from 1 to {len(known)}, or names such as"
                f" {known[0]} or {known[-1]}."
            )
        chosen.add(layer if layer in known else known[number - 1])
    return [name for name in known if name in chosen]


def _untrained(model: str) -> Subject:
    check_model(model)
    torch.manual_seed(SEED)
    network = timm.create_model(model)
    return _named(model, network, f"random weights, never trained (seed {SEED})")


def _timm_weights(model: str, checkpoint: str) -> Subject:
    check_model(model)
    read_checkpoint(checkpoint)  # says in one sentence what is wrong with a file
    weights = load_state_dict(checkpoint, weights_only=True)
    classifier = timm.create_model(model, device="meta").pretrained_cfg.get("classifier")
    bias = weights.get(f"{classifier}.bias")
    network = timm.create_model(model, **({} if bias is None else {"num_classes": len(bias)}))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"The weights in {checkpoint} do not fit the model {model!r}: {' '.join(str(error).split())[:200]} …"
        ) from error
    return _named(model, network, f"weights from {checkpoint}")


def _named(model: str, network: nn.Module, weights: str) -> Subject:
    config = resolve_data_config(model=network)
    preprocessing = Preprocessing(
        tuple(config["input_size"][1:]), config["mean"], config["std"], config["interpolation"], config["crop_pct"]
    )
    return Subject(network, model, weights, preprocessing, None, Path("runs/analysis") / model.replace("/", "_"))


def _reads_released(model: str) -> bool:
    check_model(model)
    return hasattr(timm.create_model(model, device="meta"), "native_state_dict")


def _pictures(subject: Subject, images: Sequence[str] | None, count: int) -> Pictures:
    if images:
        return from_files(images, subject.preprocessing, count, SHOWN)
    if subject.source is not None:
        return from_source(subject.source, count, SHOWN)
    return from_photos(subject.preprocessing, count, SHOWN)


def _rank(subject: Subject, view: View) -> Finding:
    measured = measure_ranks(subject.network, _batches(view.pictures.many, "rank"), view.layers)
    figures = {
        "rank": (draw.rank_figure(_some(measured)), words.RANK),
        "spectrum": (draw.spectrum_figure(measured), words.SPECTRUM),
    }
    return Finding("Rank", rows(measured), _curves(measured, SPECTRUM), figures)


def _scores(subject: Subject, view: View) -> Finding:
    few, whole = view.pictures.many[:SCORE_IMAGES], view.pictures.whole
    measured = _some(measure_scores(subject.network, _batches(few, "scores"), view.layers))
    maps = score_maps(subject.network, whole, view.point, view.layers)
    shown = [subject.preprocessing.displayed(image) for image in whole]
    figures = {
        "score_maps": (draw.score_map_figure(shown, maps, view.point), words.SCORE_MAPS),
        "scores": (draw.score_measure_figure(measured), words.SCORES),
    }
    curves = [
        {
            "layer": one.layer.name,
            "mechanism": one.layer.mechanism,
            "picture": number,
            "query": one.token,
            "scores": one.scores.tolist(),
        }
        for number, row in enumerate(maps)
        for one in row
    ]
    return Finding("Scores", rows(measured), curves, figures)


def _magnitude(subject: Subject, view: View) -> Finding:
    few = view.pictures.many[:MAGNITUDE_IMAGES]
    measured = _some(measure_magnitude(subject.network, _batches(few, "magnitude"), view.layers))
    middle = _middle(draw.layers_of(measured))
    (layer,) = probe(subject.network, few, [middle])
    readouts = compare_readouts(layer)
    figures = {
        "readouts": (draw.readout_figure(readouts), words.READOUTS.format(layer=middle)),
        "magnitude": (draw.magnitude_figure(measured), words.MAGNITUDE),
    }
    table = [{"readout": "own", **row} for row in rows(measured)] + rows(readouts)
    return Finding("Magnitude", table, _curves(readouts, SORTED), figures)


ANALYSES: dict[str, Callable[[Subject, View], Finding]] = {"rank": _rank, "scores": _scores, "magnitude": _magnitude}


def _some(measured: list[Measured]) -> list[Measured]:
    if not measured:
        raise ValueError(
            "Every chosen attention layer sees a single token, so there is nothing to measure: give larger images or"
            " other --layers."
        )
    return measured


def _middle(layers: list[Layer]) -> str:
    """The middle one of the layers over the most tokens."""
    most = max(layer.grid[0] * layer.grid[1] for layer in layers)
    largest = [layer.name for layer in layers if layer.grid[0] * layer.grid[1] == most]
    return largest[len(largest) // 2]


def _batches(images: Tensor, what: str) -> Iterator[Tensor]:
    parts = images.split(BATCH)
    return iter(track(parts, what, disable=not sys.stdout.isatty()))


def _curves(measured: Sequence[Measured], measure: str) -> list[dict[str, object]]:
    return [
        {
            "layer": one.layer.name,
            "mechanism": one.layer.mechanism,
            **one.condition,
            measure: one.mean(measure).tolist(),
        }
        for one in measured
    ]


def _write_finding(folder: Path, name: str, finding: Finding) -> None:
    for file, (figure, _) in finding.figures.items():
        write_figure(figure, folder / file)
    with replacing(folder / f"{name}.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        columns = list(dict.fromkeys(key for row in finding.rows for key in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(finding.rows)
    write_json(folder / f"{name}.json", {"rows": finding.rows, "curves": finding.curves})


def _write_page(path: Path, subject: Subject, view: View, found: dict[str, Finding]) -> None:
    pictures = view.pictures
    height, width = subject.preprocessing.size
    parameters = sum(parameter.numel() for parameter in subject.network.parameters())
    told = (
        f"{subject.name}, {parameters:,} parameters, {subject.weights}; {height}×{width} px. Images: {pictures.about}"
        f" Scores: the first {min(SCORE_IMAGES, len(pictures.many))} of these; magnitude: the first"
        f" {min(MAGNITUDE_IMAGES, len(pictures.many))}."
    )
    if unseen := unseen_attention(subject.network):
        told += f" Attention of other kinds is not looked at: {', '.join(unseen)}."
    sections: list[tuple[str, Sequence[str]]] = [
        ("What was looked at", [paragraph(told), table(_layer_table(subject, view))])
    ]
    for finding in found.values():
        images = {file: (path.parent / f"{file}.svg").read_text(encoding="utf-8") for file in finding.figures}
        parts = [
            part
            for file, (_, text) in finding.figures.items()
            for part in (drawn(images[file], file.replace("_", " ")), paragraph(text))
        ]
        sections.append((finding.title, parts))
    files = ", ".join(f"{name}.csv, {name}.json" for name in found)
    sections.append(("Numbers", [paragraph(f"Every number of these figures stands beside this page: {files}.")]))
    write_page(path, f"linvit analyze: {subject.name}", sections)


def _layer_table(subject: Subject, view: View) -> list[dict[str, Any]]:
    known = attention_layers(subject.network)
    return [
        {
            "number": known.index(one.name) + 1,
            "layer": one.name,
            "mechanism": one.mechanism,
            "tokens": f"{one.grid[0]}×{one.grid[1]}" + (f" + {one.num_prefix}" if one.num_prefix else ""),
            "heads": one.outputs().shape[1],
            "width of a head": one.outputs().shape[-1],
            "rotation": "yes" if one.operands.rotary is not None else "no",
        }
        for one in probe(subject.network, view.pictures.many[:1], view.layers)
    ]

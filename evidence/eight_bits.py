"""What 8 bits cost trained classifiers in accuracy: files of `linvit export` next to others that round more."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from linvit.analysis.markdown import check_marks, markdown_rows, replace_between_marks
from linvit.analysis.scores import evenly
from linvit.data.images.augmented import AugmentedSource
from linvit.data.source import Source, untransformed
from linvit.deploy.facts import KEY
from linvit.deploy.formats import FORMATS
from linvit.deploy.graph import OnPixels, exported, sample
from linvit.deploy.int8 import quantized
from linvit.deploy.runtimes import openvino_core
from linvit.environment import commit, processor
from linvit.fusion import fuse
from linvit.models.by_name import bundled_names
from linvit.runs import load_run
from linvit.runs.exporting import MOST_TO_CALIBRATE, calibration_images, of_run
from linvit.runs.report import answers_of
from linvit.runs.run import Run
from linvit.studies.comparison import Say, silent
from linvit.studies.table import Estimate, paired

PACKAGES = ("torch", "torchao", "onnxruntime", "openvino", "executorch")
FLOAT, OURS, EVERY_STEP, TOOL = "float32", "ours", "every step", "onnxruntime.quantization"
WAYS = (FLOAT, OURS, EVERY_STEP, TOOL)
"""How the files are made.

FLOAT, OURS: by `linvit export`. EVERY_STEP: with the same roundings, also of state, κ, α, divisions, norms and sums.
TOOL: the file in float32 by ONNX Runtime's own static quantization with its defaults, which rounds every operator that
it knows; OpenVINO reads the same file. ExecuTorch reads neither of the last two.
"""
BEGIN, END = "<!-- int8:begin -->", "<!-- int8:end -->"


@dataclass(frozen=True)
class Row:
    """One file of a network.

    top1: in %. lost: the mean over the images of its right answers minus those of the file in float32, in points, with
    a 95 % interval; None for that file. same: share of the images that both give the same class, in %.
    """

    network: str
    runtime: str
    way: str
    images: int
    top1: float
    lost: Estimate | None
    same: float

    def cells(self) -> dict[str, str]:
        lost = self.lost
        difference = "–" if lost is None else f"{lost.mean:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}]"
        return {
            "network": self.network,
            "runtime": self.runtime,
            "file": self.way,
            "top-1, %": f"{self.top1:.2f}",
            "Δ float32, points": difference,
            "same class, %": f"{self.same:.2f}",
        }


def eight_bits(
    runs: Mapping[str, Run], progress: Say = silent, suffixes: Sequence[str] = (".onnx", ".xml", ".pte"), **data: Any
) -> list[Row]:
    """The accuracy of each classifier in float32 and in 8 bits, in each runtime, on the same held-out images.

    Args:
        runs: classifiers by name.
        progress: called with a line for each file.
        suffixes: of the files: .onnx, .xml, .pte.
        data: settings of the images, see `Run.source`. Files are calibrated on 256 of its training images.
    """
    rows: list[Row] = []
    for name, run in runs.items():
        source = run.source(**data)
        images = _training_images(source)
        with TemporaryDirectory() as folder:
            for suffix in suffixes:
                rows += _of_runtime(name, run, images, Path(folder), suffix, progress, data)
    return rows


def _of_runtime(
    name: str, run: Run, images: Sequence[Any], folder: Path, suffix: str, progress: Say, data: Mapping[str, Any]
) -> Iterator[Row]:
    exact = None
    for way in (FLOAT, OURS) if suffix == ".pte" else WAYS:
        runtime = FORMATS[suffix].name
        progress(f"{name} in {runtime}: {way}")
        path = folder / f"{way.replace(' ', '_')}{suffix}"
        WRITERS[way](run, images, path)
        file = load_run(path)
        answers = answers_of(file, file.source(**data))
        exact = answers if exact is None else exact
        right, before = (100 * each.right.double() for each in (answers, exact))
        lost = None if answers is exact else paired(right.tolist(), before.tolist())
        same = 100 * (answers.predictions == exact.predictions).double().mean()
        yield Row(name, runtime, way, len(right), float(right.mean()), lost, float(same))


def _training_images(source: Source) -> list[Any]:
    """PIL images to calibrate on, evenly chosen; raises ValueError for data without them."""
    if not isinstance(source, AugmentedSource):
        raise ValueError(
            f"The data is {type(source).__name__}, expected images of classes in a folder, or of CIFAR: give others."
        )
    dataset: Any = source.images("train", untransformed)
    items = [dataset[place] for place in evenly(len(dataset), MOST_TO_CALIBRATE).tolist()]
    return [item[0] for item in items if not isinstance(item, str)]  # sentences on unreadable images


def _in_float32(run: Run, images: Sequence[Any], path: Path) -> None:
    run.export(path, dynamic=False, images=images[:1])


def _ours(run: Run, images: Sequence[Any], path: Path) -> None:
    run.export(path, dynamic=False, int8=True, calibrate=images)


def _every_step(run: Run, images: Sequence[Any], path: Path) -> None:
    """As `Run.export`, but all steps are rounded, and the file is kept however inexact it is."""
    network, facts = of_run(run)
    calibration = calibration_images(images, facts)
    facts = replace(facts, calibrated=len(calibration))
    folded = OnPixels(fuse(network.eval().cpu().float(), "graph"), facts.mean, facts.std)
    program = exported(folded, sample(facts.channels, facts.size, dynamic=False).to(FORMATS[path.suffix].pixels))
    program = quantized(program, calibration, path.suffix, dynamic=False, every_step=True)
    FORMATS[path.suffix].write(program, facts.to_json(), path, ("images",), facts.outputs)


def _by_tool(run: Run, images: Sequence[Any], path: Path) -> None:
    """A file of ONNX Runtime's quantization, calibrated on the same images."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with TemporaryDirectory(dir=path.parent) as folder:
        plain, prepared = Path(folder) / "plain.onnx", Path(folder) / "prepared.onnx"
        _in_float32(run, images, plain)
        with warnings.catch_warnings(action="ignore"):
            quant_pre_process(plain, prepared, skip_symbolic_shape=True)
            written = path.with_suffix(".onnx")
            quantize_static(prepared, written, _Reader(calibration_images(images, of_run(run)[1])))
    if path.suffix != written.suffix:
        import openvino

        with_facts = FORMATS[written.suffix].open(written, None, "float32")[0]
        model = openvino_core().read_model(written)
        model.set_rt_info(with_facts, KEY)
        openvino.save_model(model, path, compress_to_fp16=False)


class _Reader:
    """Images, one by one, as onnxruntime.quantization wants them."""

    def __init__(self, images: Tensor) -> None:
        self.batches = iter(images.split(1))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch.numpy()}


WRITERS: Mapping[str, Callable[[Run, Sequence[Any], Path], None]] = {
    FLOAT: _in_float32,
    OURS: _ours,
    EVERY_STEP: _every_step,
    TOOL: _by_tool,
}


def to_markdown(rows: Sequence[Row]) -> str:
    """The table, and a line on images, packages and commit."""
    table = markdown_rows([row.cells() for row in rows], left=3)
    counts = " and ".join(f"{count:,}" for count in sorted({row.images for row in rows}))
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    software = f"{processor()}; {packages}; commit {(commit() or 'unknown')[:12]}"
    return f"{table}\n\n*{counts} images; Δ: mean over the images with its 95 % interval; {software}.*\n"


def write_bundled(root: str | Path, page: Path, progress: Say = silent) -> None:
    """Measures the networks that come with weights on CIFAR-10 in `root`; the table goes between the marks of a page.

    Raises ValueError if no network comes with weights, or the page has no marks, and as `eight_bits`.
    """
    check_marks(page, BEGIN, END)
    names = bundled_names()
    if not names:
        raise ValueError(
            "No network comes with weights in this copy of linvit: train them with `python -m evidence run weights`."
        )
    rows = eight_bits({name: load_run(model=name) for name in names}, progress, data="cifar", root=str(root))
    replace_between_marks(page, f"\n{to_markdown(rows)}", BEGIN, END)

"""`linvit bench model`: whole networks, ours in every variant, next to named peers."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from linvit.bench import memory, rows
from linvit.bench.clock import Call
from linvit.bench.exactness import TOLERANCES, check
from linvit.bench.networks import (
    BYTES_PER_PIXEL,
    OURS,
    Case,
    build_call,
    create,
    images,
    parts_of,
    randomised,
    row_of,
    variant_call,
)
from linvit.bench.rows import Progress, Report, Row, Timed
from linvit.bench.runtimes import FileCall, file_call
from linvit.deploy.formats import FORMATS
from linvit.files import reason_of
from linvit.models.by_name import check_model, is_ours
from linvit.ranges import Count

PEERS = (
    "swin_tiny_patch4_window7_224",
    "deit_small_patch16_224",
    "convnext_tiny",
    "efficientvit_b1",
    "fastvit_t8",
    "mobilenetv4_conv_medium",
)


@dataclass(frozen=True)
class Options(rows.Options):
    """Options of `linvit bench model`; sizes are (height, width).

    variants: of every network, and exported files, each timed once.
    """

    names: Sequence[str] = OURS
    variants: Sequence[str] = ("plain", "reference", "fused")
    peers: Sequence[str] = PEERS
    peer_variants: Sequence[str] = ("plain", "fused")
    sizes: Sequence[tuple[Count, Count]] = ((224, 224),)
    batches: Sequence[Count] = (1,)
    framework: str | None = None  # of segmentors, whose backbones the networks are

    def __post_init__(self) -> None:
        for name in (*self.names, *self.peers):
            check_model(name)
        for variant in (*self.variants, *self.peer_variants):
            if variant in self.peer_variants or not is_file(variant):
                parts_of(variant)
            elif not Path(variant).exists():
                raise FileNotFoundError(f"The file {variant} does not exist: check the path.")

    def least_bytes(self) -> int:
        """The bytes of the images and of a network's first maps, a lower bound."""
        pixels = max((math.prod(size) for size in self.sizes), default=0)
        return BYTES_PER_PIXEL * pixels * max(self.batches, default=0)


def is_file(variant: str) -> bool:
    """Whether a variant is the path of an exported file."""
    return Path(variant).suffix in FORMATS


def cases(options: Options, size: tuple[int, int], batch: int) -> list[Case]:
    """All networks and variants at one size and batch; `reference` only if a released order exists."""
    files = [variant for variant in options.variants if is_file(variant)]
    listed = [(name, variant) for name in options.names for variant in options.variants if variant not in files]
    listed += [(name, variant) for name in options.peers for variant in options.peer_variants]
    listed += [(Path(file).stem, file) for file in files]
    return [
        Case(name, variant, size, batch, options.device, options.threads, options.seed, options.framework)
        for name, variant in dict.fromkeys(listed)
        if is_file(variant) or is_ours(name) or "reference" not in parts_of(variant)
    ]


def measure(options: Options, report: Report, progress: Progress) -> None:
    """Checks every variant against the plain network, then times all, size by size, into report.

    A peer's variant that is wrong keeps its row, with the reason and no speed.

    Raises:
        WrongResultError: before anything of that size is timed, if a variant of ours is wrong.
    """
    with torch.inference_mode():
        try:
            for size, batch in itertools.product(options.sizes, options.batches):
                progress.group(f"{size[0]} × {size[1]} px, batch {batch}", options.rounds)
                _measure_one_size(options, cases(options, size, batch), report, progress)
        finally:
            report.findings.update(findings(report.rows))


def _measure_one_size(options: Options, group: list[Case], report: Report, progress: Progress) -> None:
    calls: dict[str, Timed] = {}
    files = [case for case in group if is_file(case.variant)]
    networks = [case for case in group if case not in files]
    for _, variants in itertools.groupby(networks, lambda case: case.name):
        calls |= _checked(list(variants), options, report, progress)
    calls |= _of_files(files, options, report, progress)
    rows.time_all(calls, options, progress)


def _checked(group: list[Case], options: Options, report: Report, progress: Progress) -> dict[str, Timed]:
    """The calls of one network by label, each checked against the plain one; a row without a call says why."""
    first, calls = group[0], {}
    x = images(first)
    try:
        network = randomised(create(first.name, first.size, first.framework)).to(first.device)
        expected = network(x)
    except Exception as error:  # networks of others raise errors of many classes for sizes that they do not support
        if is_ours(first.name) and not isinstance(error, ValueError):
            raise
        report.rows += [row_of(case, None, skipped=reason_of(error)) for case in group]
        return {}
    for case in group:
        row = row_of(case, network)
        report.rows.append(row)
        progress.say(f"checking {case.label}")
        try:
            call = variant_call(network, x, case)
            row.error = check(case.label, call(), (expected,), TOLERANCES[case.dtype])
        except Exception as error:
            if is_ours(case.name) and not isinstance(error, (ValueError, ImportError)):
                raise
            row.skipped = reason_of(error)
            continue
        _measure_memory(case, row, call, options, progress)
        calls[case.label] = Timed(row, call, replace(case, variant="plain").label, _rivals(case, options))
    return calls


def _of_files(group: list[Case], options: Options, report: Report, progress: Progress) -> dict[str, Timed]:
    """The calls of exported files by label; they were checked when they were written."""
    calls = {}
    for case in group:
        row = row_of(case, None)
        report.rows.append(row)
        progress.say(f"opening {case.variant}")
        call = file_call(Path(case.variant), images(case), case.threads)
        row.dtype = "int8" if call.int8 else row.dtype
        _measure_memory(case, row, call, options, progress)
        calls[case.label] = Timed(row, call, rivals=_rivals(case, options))
    return calls


def _measure_memory(case: Case, row: Row, call: Call, options: Options, progress: Progress) -> None:
    peak: Callable[[], float | None] = partial(memory.peak, case.device, case.threads, call, build_call, case)
    if isinstance(call, FileCall):
        row.file_mib, peak = call.mebibytes, call.peak
    if options.memory:
        progress.say(f"memory of {case.label}")
        row.peak_mib = peak()


def _rivals(case: Case, options: Options) -> dict[str, str]:
    rivals = {"reference": replace(case, variant="reference").label}
    variants = dict.fromkeys(("plain", "fused", case.variant))
    for variant, name in itertools.product(variants, (*options.names, *options.peers)):
        if name != case.name:
            rivals[f"{name} {variant}"] = replace(case, name=name, variant=variant).label
    return rivals


def findings(measured: Sequence[Row]) -> dict[str, dict[str, float]]:
    """growth, memory_growth: exponents of pixels; crossover: pixels from which a network without softmax is faster."""
    lines = {name: line for name, line in rows.curves(measured).items() if len(line) > 1}
    meets = {
        f"{name} against {other}": rows.crossover(lines[name], lines[other])
        for name, other in itertools.permutations(lines, 2)
        if _without_softmax(lines[name][0]) and _rival(lines[name][0], lines[other][0])
    }
    return {
        "growth": rows.growth(measured),
        "memory_growth": rows.growth(measured, quantity="peak_mib"),
        "crossover": {name: value for name, value in meets.items() if value is not None},
    }


def _without_softmax(row: Row) -> bool:
    return row.pattern is not None and "S" not in row.pattern


def _rival(row: Row, other: Row) -> bool:
    """A network with softmax, computed the same way: ours with S in its pattern, or a transformer of timm's."""
    softmax = "S" in other.pattern if other.pattern else other.name.startswith(("swin", "deit", "vit"))
    return softmax and (row.variant, row.batch) == (other.variant, other.batch)

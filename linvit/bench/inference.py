"""`linvit bench model`: whole networks, ours in every variant, next to named peers."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from linvit.bench.clock import Call, TensorsCall
from linvit.bench.exactness import TOLERANCES
from linvit.bench.machine import peak
from linvit.bench.networks import (
    Case,
    FileCall,
    build_call,
    create,
    file_call,
    images,
    parts_of,
    randomised,
    row_of,
    variant_call,
)
from linvit.bench.options import NetworkOptions
from linvit.bench.rows import Groups, Progress, Report, Row, Trial, crossover, curves, growth, measure_groups
from linvit.deploy.formats import FORMATS
from linvit.files import reason_of
from linvit.models.by_name import check_model, is_ours


def check_options(options: NetworkOptions) -> None:
    """Raises ValueError for names that do not exist, FileNotFoundError for a missing file."""
    for name in (*options.names, *options.peers):
        check_model(name)
    for variant in (*options.variants, *options.peer_variants):
        if variant in options.peer_variants or not _is_file(variant):
            parts_of(variant)
        elif not Path(variant).exists():
            raise FileNotFoundError(f"The file {variant} does not exist: check the path.")


def _is_file(variant: str) -> bool:
    """Whether a variant is the path of an exported file."""
    return Path(variant).suffix in FORMATS


def measure(options: NetworkOptions, report: Report, progress: Progress) -> None:
    """Checks every variant against the plain network, then times all, size by size, into report.

    A peer's variant that is wrong keeps its row, with the reason and no speed; raises as `measure_groups`.
    """
    with torch.inference_mode():
        try:
            measure_groups(groups(options), options, report, progress)
        finally:
            report.findings.update(findings(report.rows))


def groups(options: NetworkOptions) -> Groups:
    """All networks and variants at each size and batch; `reference` only if a released order exists."""
    files = [variant for variant in options.variants if _is_file(variant)]
    named = [(name, variant) for name in options.names for variant in options.variants if variant not in files]
    named += [(name, variant) for name in options.peers for variant in options.peer_variants]
    named = [pair for pair in dict.fromkeys(named) if is_ours(pair[0]) or "reference" not in parts_of(pair[1])]
    for size, batch in itertools.product(options.sizes, options.batches):
        case = Case("", "", size, batch, options.device, options.threads, options.seed, options.framework)
        cases = [replace(case, name=name, variant=variant) for name, variant in named]
        networks = (_trials(list(group), options) for _, group in itertools.groupby(cases, lambda case: case.name))
        of_files = (_of_file(replace(case, name=Path(file).stem, variant=file), options) for file in files)
        yield f"{size[0]} × {size[1]} px, batch {batch}", itertools.chain(*networks, of_files)


def _trials(group: list[Case], options: NetworkOptions) -> Iterator[Trial]:
    """The variants of one network, each checked against the plain one; a row without a call says why."""
    first, x = group[0], images(group[0])
    try:
        network = randomised(create(first.name, first.size, first.framework)).to(first.device)
        expected = network(x)
    except Exception as error:  # networks of others raise errors of many classes for sizes that they do not support
        if is_ours(first.name) and not isinstance(error, ValueError):
            raise
        yield from (Trial(row_of(case, None, skipped=reason_of(error)), case.label) for case in group)
        return
    for case in group:
        row = row_of(case, network)
        yield Trial(
            row,
            case.label,
            make=partial(_with_file_size, row, partial(variant_call, network, x, case)),
            expected=lambda: (expected,),
            tolerance=TOLERANCES[case.dtype],
            excused=(ValueError, ImportError) if is_ours(case.name) else (Exception,),
            peak=partial(_peak, case),
            base=replace(case, variant="plain").label,
            rivals=_rivals(case, options),
        )


def _of_file(case: Case, options: NetworkOptions) -> Trial:
    """An exported file, which was checked when it was written."""
    row = row_of(case, None)
    make = partial(_with_file_size, row, lambda: file_call(Path(case.variant), images(case), case.threads))
    return Trial(row, case.label, make, excused=(), peak=partial(_peak, case), rivals=_rivals(case, options))


def _with_file_size(row: Row, make: Callable[[], TensorsCall]) -> TensorsCall:
    """The call, and in the row what its file says, if it has one."""
    call = make()
    if isinstance(call, FileCall):
        row.file_mib, row.dtype = call.mebibytes, "int8" if call.int8 else row.dtype
    return call


def _peak(case: Case, call: Call) -> float | None:
    return call.peak() if isinstance(call, FileCall) else peak(build_call, case, case.device, case.threads, call)


def _rivals(case: Case, options: NetworkOptions) -> dict[str, str]:
    rivals = {"reference": replace(case, variant="reference").label}
    variants = dict.fromkeys(("plain", "fused", case.variant))
    for variant, name in itertools.product(variants, (*options.names, *options.peers)):
        if name != case.name:
            rivals[f"{name} {variant}"] = replace(case, name=name, variant=variant).label
    return rivals


def findings(measured: Sequence[Row]) -> dict[str, dict[str, float]]:
    """growth, memory_growth: exponents of pixels; crossover: pixels from which a network without softmax is faster."""
    lines = {name: line for name, line in curves(measured).items() if len(line) > 1}
    meets = {
        f"{name} against {other}": crossover(lines[name], lines[other])
        for name, other in itertools.permutations(lines, 2)
        if _meets(lines[name][0], lines[other][0])
    }
    return {
        "growth": growth(measured),
        "memory_growth": growth(measured, quantity="peak_mib"),
        "crossover": {name: value for name, value in meets.items() if value is not None},
    }


def _meets(row: Row, other: Row) -> bool:
    """Whether a network without softmax meets one with it: ours with S in its pattern, or a transformer of timm's."""
    without = row.pattern is not None and "S" not in row.pattern
    softmax = "S" in other.pattern if other.pattern else other.name.startswith(("swin", "deit", "vit"))
    return without and softmax and (row.variant, row.batch) == (other.variant, other.batch)

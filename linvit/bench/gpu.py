"""`linvit check-gpu`: whether the Triton kernels are exact on a GPU, how fast they are, and a record of both."""

import itertools
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from linvit.analysis.markdown import markdown_table
from linvit.bench import depthwise, kinds, page, product
from linvit.bench.depthwise import WORKS, Work, deviations_of, operands, results
from linvit.bench.exactness import (
    KERNEL,
    PLAIN,
    SOFTMAX_KERNEL,
    Deviation,
    WrongResultError,
    deviations,
    deviations_in_bfloat16,
    plain_softmax,
)
from linvit.bench.options import CORES
from linvit.bench.product import LAYERS, Layer
from linvit.bench.rows import Progress
from linvit.environment import end_with_parent, forks_of
from linvit.files import reason_of, user_path, write_json, write_text
from linvit.kernels import record
from linvit.kernels.support import PADDED, SHARED, machine_obstacle, padded
from linvit.ops import rotary_1d

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "rala": {"weighting": "query_mean"},
    "mala": {"normalizer": "magnitude"},
    "linear": {},
    "causal mala": {"normalizer": "magnitude", "causal": True},
    "causal linear": {"causal": True},
    "softmax": {},
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((3136, 64), (126, 16), (1023, 128), (784, 48), (20, 32))
"""Tokens and head widths: of the networks, odd ones, the widest, and fewer tokens than a tile.

The gradient of a single token's query is nothing but rounding, and with three tokens an error is twice as large in one
draw as in another.
"""
SHORT_SHAPES = ((196, 64), (49, 64), (256, 128), (126, 16), (20, 32))
"""The same of softmax attention."""
MAP = (2, 40, 28, 19)
"""Images, channels of a group, height and width of depthwise convolutions; of other layers without channels."""
HEADS = 4
VARIANTS = ("plain", "triton", "reference", "sdpa", "flash_bla")
BENCHMARKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "forward": (
        "op",
        {
            "variants": VARIANTS,
            "dtypes": ("float32", "bfloat16"),
            "tokens": (49, 196, 784, 3136, 12544),
            "batch": 8,
            "memory": True,
        },
    ),
    "backward": (
        "op",
        {"variants": VARIANTS, "dtypes": ("bfloat16",), "tokens": (784, 3136), "batch": 8, "backward": True},
    ),
    "networks": (
        "model",
        {
            "variants": ("plain", "fused", "fused+triton", "fused+bf16", "fused+bf16+triton"),
            "peer_variants": ("plain", "bf16"),
            "batches": (1, 64),
        },
    ),
}
PASSED = "The kernels are exact on this GPU, so `linear_attention` uses them here from now on."
FAILED = "The kernels are not exact on this GPU, so `linear_attention` uses them only with `backend='triton'`."
PAGE = "check-gpu.md"


@dataclass(frozen=True)
class Check:
    """One case of the check. case: in words. worst: of output and gradients, the one nearest to, or beyond, what is
    allowed; None if the case ended in an error. failure: why it failed, None if it passed.
    """

    case: str
    worst: Deviation | None
    failure: str | None


def checks(device: torch.device, progress: Progress) -> list[Check]:
    """Output and gradients of every case against float64, and whether they are the same bits every time."""
    named = cases(device)
    compile_in_parallel(device, list(named), progress)
    progress.group("exactness", len(named))
    done = []
    for case, errors in named.items():
        progress.say(f"checking {case}")
        done.append(checked(case, errors))
        progress.advance()
    return done


def compile_in_parallel(device: torch.device, names: Sequence[str], progress: Progress) -> None:
    """Runs these cases in new processes, so that Triton's cache has their kernels; what fails is left to the check."""
    fitting = torch.cuda.mem_get_info(device)[0] // 2**30 if device.type == "cuda" else 0  # about 1 GiB each
    if (number := min(CORES, len(names), fitting)) < 2:
        return
    progress.group(f"compiling in {number} processes", len(names))
    named, others = cases(device), multiprocessing.active_children()
    with ProcessPoolExecutor(number, forks_of(__name__), end_with_parent) as pool:
        try:
            for _ in as_completed([pool.submit(checked, name, named[name]) for name in names]):
                progress.advance()
        finally:
            for process in set(multiprocessing.active_children()) - set(others):
                process.kill()  # it is idle, or Ctrl-C was pressed


def cases(device: torch.device) -> dict[str, Callable[[], list[Deviation]]]:
    """The errors of every case, by its name. Each has a seed of its own, so that it gives the same alone."""
    named: dict[str, Callable[[], list[Deviation]]] = {}
    for name, options in OPTIONS.items():
        calls = name if name in SHARED else "causal" if "causal" in options else "bidirectional"
        shapes = SHORT_SHAPES if calls == "softmax" else SHAPES
        for dtype, (tokens, width) in itertools.product(DTYPES, shapes):
            if dtype in SHARED[calls] and machine_obstacle(device, dtype, padded(width), calls) is None:
                case = f"{name}, {str(dtype).removeprefix('torch.')}, {tokens} tokens, width {width}"
                named[case] = partial(_errors, case, name, dtype, (tokens, width), device)
        if any(case.startswith(f"{name}, ") for case in named):
            case = f"{name}, same bits every time"
            named[case] = partial(_errors, case, name, None, shapes[0], device)
    for name, dtype in itertools.product(WORKS, DTYPES):
        if machine_obstacle(device, dtype, calls="depthwise") is None:
            case = f"{name}, {str(dtype).removeprefix('torch.')}"
            named[case] = partial(_errors_of_convolutions, case, WORKS[name], dtype, device)
    for name, dtype in itertools.product(LAYERS, DTYPES):
        if machine_obstacle(device, dtype, calls="product") is None:
            case = f"{name}, {str(dtype).removeprefix('torch.')}"
            named[case] = partial(_errors_of_product, case, LAYERS[name], dtype, device)
    return named


@torch.random.fork_rng()
def _errors_of_convolutions(case: str, work: Work, dtype: torch.dtype, device: torch.device) -> list[Deviation]:
    """The errors in that dtype, and whether output and gradients have the same bits twice."""
    torch.manual_seed(crc32(case.encode()))
    given = operands(work, MAP, device)
    first, second = (results(work, given.to(dtype), depthwise.kernel) for _ in range(2))
    same = all(map(torch.equal, first, second))
    return [*deviations_of(work, given, dtype), Deviation("same bits", float(not same), 0.0)]


@torch.random.fork_rng()
def _errors_of_product(case: str, layer: Layer, dtype: torch.dtype, device: torch.device) -> list[Deviation]:
    """The error in that dtype, and whether the output has the same bits twice."""
    torch.manual_seed(crc32(case.encode()))
    given = product.operands(layer, (MAP[0], *MAP[2:]), device)
    first, second = (product.kernel(product.cast_to(dtype, given)) for _ in range(2))
    same = torch.equal(first, second)
    return [product.deviation_of(layer, given, dtype), Deviation("same bits", float(not same), 0.0)]


@torch.random.fork_rng()
def _errors(
    case: str, name: str, dtype: torch.dtype | None, shape: tuple[int, int], device: torch.device
) -> list[Deviation]:
    """The errors in that dtype; without one, whether the output has the same bits twice."""
    torch.manual_seed(crc32(case.encode()))
    (tokens, width), options = shape, OPTIONS[name]
    kernel, plain, same = (KERNEL, PLAIN, torch.float32)
    if name == "softmax":
        kernel, plain, same = (SOFTMAX_KERNEL, plain_softmax, torch.float16)
    # as linear layers give them, heads inside tokens
    tensors = [torch.randn(2, tokens, HEADS, width, device=device).transpose(1, 2) for _ in range(3)]
    if dtype is None:
        first, second = (kernel(*(x.to(same) for x in tensors), **options) for _ in range(2))
        return [Deviation("output", float(not torch.equal(first, second)), 0.0)]
    rotary = rotary_1d(*shape, device=device)
    if dtype == torch.bfloat16:
        return deviations_in_bfloat16(tensors, kernel, plain, rotary=rotary, **options)
    return deviations(tensors, dtype, kernel, plain, rotary=rotary, **options)


def checked(case: str, errors: Callable[[], list[Deviation]]) -> Check:
    """Whether a case has errors that are allowed, and raises none."""
    try:
        rows = errors()
    except Exception as error:  # compilers and drivers raise errors of many classes
        return Check(case, None, reason_of(error))
    worst = max(rows, key=lambda row: row.error / row.allowed if row.allowed else row.error)
    wrong = next((row for row in rows if not row.error <= row.allowed), None)
    failure = None if wrong is None else f"{wrong.name}: error {wrong.error:.1e}, allowed {wrong.allowed:.1e}"
    return Check(case, worst, failure)


def check_gpu(folder: str | Path, progress: Progress | None = None, benchmarks: bool = True) -> list[Check]:
    """Checks the Triton kernels on the GPU of this machine, times them, and writes a record and a page.

    With a record that they passed, `linear_attention(backend="auto")` uses them on every GPU of this kind, until torch,
    Triton or the kernels change.

    Args:
        folder: for check-gpu.md, and for each benchmark a folder with bench.json and figures.
        progress: its methods are called at each step; None shows nothing.
        benchmarks: whether to time operators and networks too, if the kernels passed.

    Returns:
        All cases; the kernels passed if none has a failure.

    Raises:
        ValueError: without a GPU, or if the kernels do not support it; the message says why.
    """
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: run this on a machine where torch.cuda.is_available() is true.")
    device, folder, progress = torch.device("cuda"), user_path(folder), progress or Progress()
    reason = machine_obstacle(device)
    if reason is not None:
        raise ValueError(f"The Triton kernels cannot run on this machine: {reason}.")
    done = checks(device, progress)
    _record(done, folder)
    passed = all(check.failure is None for check in done)
    sections: list[str] = []
    for name, (kind, options) in BENCHMARKS.items() if benchmarks and passed else ():
        try:
            report = kinds.measure(kind, progress, device="cuda", **options)
        except WrongResultError as error:
            done.append(Check(f"benchmark {name}", None, str(error)))
        else:
            page.save(report, folder / name)
            figures = [f"![{file.stem}]({name}/{file.name})" for file in sorted((folder / name).glob("*.svg"))]
            sections += [f"## {name.capitalize()}", page.to_markdown(report), *figures]
        _record(done, folder, sections)
    return done


def _record(done: Sequence[Check], folder: Path, sections: Sequence[str] = ()) -> None:
    """Writes what is known so far into the record and the page, whose first section has a row for every case."""
    about = record.about()
    failures = {check.case: check.failure for check in done if check.failure is not None}
    write_json(record.path(about), {"about": about, "passed": not failures, "failures": failures})
    record.forget()
    facts = ", ".join(f"{name} {value}" for name, value in about.items() if name in ("capability", "torch", "triton"))
    table = markdown_table(
        ["case", "worst of", "error", "allowed", "result"],
        [[check.case, *_numbers(check.worst), check.failure or "passed"] for check in done],
        left=2,
    )
    kinds_of_calls = itertools.product(DTYPES, PADDED, SHARED)
    clauses = [machine_obstacle(torch.device("cuda"), *each) for each in kinds_of_calls if each[0] in SHARED[each[2]]]
    obstacles = [clause for clause in dict.fromkeys(clauses) if clause is not None]
    left_out = [f"Left out: {'; '.join(obstacles)}."] if obstacles else []
    verdict = f"{FAILED if failures else PASSED} ({facts})"
    write_text(folder / PAGE, "\n\n".join([f"# {about['gpu']}", verdict, *left_out, table, *sections]) + "\n")


def _numbers(worst: Deviation | None) -> list[str]:
    if worst is None:
        return [page.MISSING] * 3
    return [worst.name, f"{worst.error:.1e}", f"{worst.allowed:.1e}"]

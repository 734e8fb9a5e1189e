"""The error of RALA and MALA in half precision, as we arrange them and as they were released.

Nothing is timed. Errors are relative L2 errors against float64 on unrounded inputs, infinite if the result is not
finite. A row's own error is ours; next to it are those of
released: the released arrangement, all in the row's dtype;
float32 math: rounded inputs, float32 from there on, output in float32;
returned in dtype: the same, its output rounded to the dtype, the least that an operator in that dtype can reach.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.bench import reference
from linvit.bench.exactness import TOLERANCES, check, relative_error
from linvit.bench.operators import DTYPES
from linvit.bench.options import Options as CommonOptions
from linvit.bench.page import TOKENS, Cell, formatted
from linvit.bench.rows import Progress, Report, Row
from linvit.ops import mala, rala
from linvit.ranges import Count, check_names

HEADS, WIDTH, CHECKED = 2, 64, 60
OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rala": (rala, reference.rala),
    "mala": (mala, reference.mala),
}


def _cell(arrangement: str | None = None) -> Cell:
    def cell(row: Row) -> str:
        error = row.error if arrangement is None else row.errors[arrangement]
        return f"{error:.1e}" if error is not None and math.isfinite(error) else "not finite"

    return cell


COLUMNS: dict[str, Cell] = {
    "operator": lambda row: row.name, "inputs": lambda row: row.variant, "dtype": lambda row: row.dtype, **TOKENS,
    "released": _cell("released"), "float32 math": _cell("float32 math"),
    "returned in dtype": _cell("returned in dtype"), "ours": _cell(),
    "ours / float32 math": lambda row: formatted((row.error or 0) / row.errors["float32 math"]),
}  # fmt: skip


@dataclass(frozen=True)
class Options(CommonOptions):
    """Queries, keys and values are drawn from N(0, deviation²)."""

    names: Sequence[str] = tuple(OPERATORS)
    tokens: Sequence[Count] = (196, 3136, 12544, 50176)
    deviations: Sequence[int] = (1, 4, 16)
    dtypes: Sequence[str] = ("float16", "bfloat16")

    def __post_init__(self) -> None:
        check_names("operator", self.names, OPERATORS)
        check_names("dtype", self.dtypes, DTYPES)

    def least_bytes(self) -> int:
        """Query, key and value in float64 and float32."""
        return 3 * (8 + 4) * HEADS * WIDTH * max(self.tokens, default=0)


@torch.inference_mode()
def measure(options: Options, report: Report, progress: Progress) -> None:
    """Checks that both arrangements are the same in float64, then measures their errors in half precision."""
    for name in options.names:
        ours, released = OPERATORS[name]
        inputs = _inputs(options.seed, 1, CHECKED)
        check(f"the released {name}", (released(*inputs),), (ours(*inputs),), TOLERANCES[torch.float64])
        progress.group(name, len(options.tokens) * len(options.deviations))
        for tokens, deviation in itertools.product(options.tokens, options.deviations):
            exact_inputs = _inputs(options.seed, deviation, tokens)
            exact = ours(*exact_inputs)
            for dtype in options.dtypes:
                inputs = exact_inputs.to(DTYPES[dtype])
                wide = ours(*inputs.float())
                row = Row(name, f"deviation {deviation}", dtype, 1, options.threads, tokens=tokens)
                row.error = relative_error(ours(*inputs), exact)
                others = {
                    "released": released(*inputs),
                    "float32 math": wide,
                    "returned in dtype": wide.to(DTYPES[dtype]),
                }
                row.errors = {other: relative_error(output, exact) for other, output in others.items()}
                report.rows.append(row)
            progress.advance()


def _inputs(seed: int, deviation: int, tokens: int) -> Tensor:
    """float64 (3, 1, heads, tokens, width): query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    return deviation * torch.randn(3, 1, HEADS, tokens, WIDTH, dtype=torch.float64, generator=generator)

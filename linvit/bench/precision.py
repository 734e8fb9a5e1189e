"""Half precision: the error of RALA and MALA as we arrange them and as they were released.

Run `python -m linvit.bench.precision` for the table of docs/results.md.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.bench import reference
from linvit.ops import mala, rala

TOKENS = (196, 3136, 12544, 50176)
SCALES = (1, 4, 16)
DTYPES = (torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """Relative L2 errors against float64 on unrounded inputs; NaN where the result is not finite.

    float32_math: rounded inputs, float32 from there on, output in float32. returned: the same, its output rounded to
    the inputs' dtype: the least that an operator in that dtype can reach. released, ours: all in that dtype.
    """

    operator: str
    tokens: int
    scale: int
    dtype: torch.dtype
    float32_math: float
    returned: float
    released: float
    ours: float


OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rala": (rala, reference.rala),
    "mala": (mala, reference.mala),
}


def half_precision(seed: int = 0, tokens: tuple[int, ...] = TOKENS) -> Iterator[Row]:
    """Errors for q, k, v ~ N(0, scale²), 2 heads of width 64, for every operator, length, scale and half dtype."""
    for operator, length, scale in itertools.product(OPERATORS, tokens, SCALES):
        ours, released = OPERATORS[operator]
        generator = torch.Generator().manual_seed(seed)
        exact_inputs = scale * torch.randn(3, 1, 2, length, 64, dtype=torch.float64, generator=generator)
        exact = ours(*exact_inputs)
        for dtype in DTYPES:
            inputs = exact_inputs.to(dtype)
            wide = ours(*inputs.float())
            outputs = (wide, wide.to(dtype), released(*inputs), ours(*inputs))
            yield Row(operator, length, scale, dtype, *(_error(out, exact) for out in outputs))


def markdown(rows: Iterator[Row]) -> Iterator[str]:
    """The table, line by line."""
    yield "| operator | N | std | dtype | released arrangement | float32 math | returned in dtype | ours | ratio |"
    yield "|---|---:|---:|---|---:|---:|---:|---:|---:|"
    for row in rows:
        dtype = str(row.dtype).removeprefix("torch.")
        released = "NaN" if row.released != row.released else f"{row.released:.1e}"
        yield (
            f"| {row.operator} | {row.tokens} | {row.scale} | {dtype} | {released} | {row.float32_math:.1e} "
            f"| {row.returned:.1e} | {row.ours:.1e} | {row.ours / row.float32_math:.2f} |"
        )


def _error(out: Tensor, exact: Tensor) -> float:
    return ((out - exact).norm() / exact.norm()).item() if out.isfinite().all() else float("nan")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    for line in markdown(half_precision(parser.parse_args().seed)):
        print(line, flush=True)

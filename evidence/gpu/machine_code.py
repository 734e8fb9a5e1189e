"""Compiles linvit's kernels to machine code for a GPU, without one: Triton brings the compiler and the assembler."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton

from linvit.kernels import launch

PROCESSORS = 132  # of an H100 and of an H200


class NoGPU(NamedTuple):
    """Stands for Triton's driver: says what to compile for."""

    capability: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> Any:
        return self  # a kernel keeps what it compiled by device, and this one should not be taken for a real one

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[Counter[str]]:
    """Launches of linvit's kernels only compile what they would run on a GPU of this capability; none is needed.

    Counts the kernels "compiled" and "read" from the cache. The tensors may be on the CPU or on "meta", where the
    largest cost nothing: only their types, strides and alignment matter.
    """
    counts, run = Counter(compiled=0, read=0), triton.JITFunction.run

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=True, **options)

    def count(*, cache_hit: bool, **_: Any) -> None:
        counts["read" if cache_hit else "compiled"] += 1

    machine = patch.multiple(launch, _stages={}, _processors=lambda device: PROCESSORS)
    driver = patch.object(triton.runtime.driver, "_active", NoGPU(capability))
    with triton.knobs.compilation.scope(), machine, driver, patch.object(triton.JITFunction, "run", compile_alone):
        triton.knobs.compilation.store_binary_only, triton.knobs.compilation.listener = True, count
        yield counts

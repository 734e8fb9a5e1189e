"""Compiles linvit's kernels to machine code for a GPU, without one: Triton brings the compiler and the assembler."""

import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton

from linvit.bench import product
from linvit.bench.depthwise import WORKS, operands
from linvit.bench.product import LAYERS, Layer
from linvit.kernels import depthwise_launch, launch, product_launch
from linvit.kernels.softmax_launch import softmax_backward, softmax_forward

PROCESSORS = 132  # of an H100 and of an H200
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)(.*)")
SHORT = (49, 196)  # tokens of softmax attention, in the last stages of pyramids at 224 px
CONVOLUTIONS = {
    "LePE and gate": (WORKS["LePE and gate"], 64, 56),
    "feed-forward": (WORKS["feed-forward"], 224, 56),
    "strips and local groups": (WORKS["strips and local groups"], 24, 28),
}
"""Work, channels of a group and height of a map."""
PRODUCTS = {
    "norm and projections": (LAYERS["norm and projections"], 56),
    "norm, GELU": (Layer((256,), 896, norm=True, activation="gelu"), 14),
    "product and sum": (Layer((896,), 256, residual=(256,)), 14),
    "groups, layer scale and sum": (LAYERS["groups, layer scale and sum"], 28),
    "convolution, GELU": (Layer((32,), 32, 3, 1, 1, activation="gelu"), 112),
}
"""Layers, and the height of their map."""
PRESETS = {"rala": (True, "divide"), "mala": (False, "magnitude"), "linear": (False, "divide")}


class Code(NamedTuple):
    """What the compiler made of a kernel.

    Attributes:
        registers: per thread.
        spilled: bytes of registers in memory, per thread.
        barriers, instructions: of the main loop, these for 64 tokens and by all warps; of depthwise convolutions those
            of a thread for each of its outputs; of products those of all warps for a step of the loop, or for the whole
            tile where the compiler has unrolled it.
    """

    registers: int
    spilled: int
    barriers: int
    instructions: int


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

    machine = patch.multiple(launch, _stages={}, processors=lambda device: PROCESSORS)
    convolutions = patch.object(depthwise_launch, "processors", lambda device: PROCESSORS)
    products = patch.object(product_launch, "processors", lambda device: PROCESSORS)
    driver = patch.object(triton.runtime.driver, "_active", NoGPU(capability))
    compiler = patch.object(triton.JITFunction, "run", compile_alone)
    with triton.knobs.compilation.scope(), machine, convolutions, products, driver, compiler:
        triton.knobs.compilation.store_binary_only, triton.knobs.compilation.listener = True, count
        yield counts


def codes(capability: int, width: int = 64, tokens: int = 3136, backward: bool = True) -> dict[str, Code]:
    """The code of the kernels for bfloat16 with a rotation, 64 images of eight heads, by preset and kernel.

    Without tensor cores for it, below 8.0, for float16, and without softmax attention.
    """
    by_name: dict[str, Code] = {}
    products, short = (("HGMMA", "HMMA"), SHORT) if capability >= 80 else (("FFMA",), ())

    def note(kernel: Any, *args: Any, preset: str, **options: Any) -> Any:
        binary = compile_alone(kernel, *args, **options)
        name = f"{preset} {kernel.__name__}"
        if "ROWS" in options:
            work = 64 * binary.metadata.num_warps / options["ROWS"]
            by_name[name + " again" * (name in by_name)] = _code(binary, products, work)
        return binary

    with compiling(capability):
        compile_alone = triton.JITFunction.run
        for preset, (query_mean, normalizer) in PRESETS.items():
            with patch.object(triton.JITFunction, "run", partialmethod(note, preset=preset)):
                inputs = shapes(tokens, width, _dtype(capability))
                options = launch.Options("elu1", "elu1", query_mean, normalizer, 1e-6)
                out, states, sums = launch.forward(inputs, options)
                if backward and states is not None:
                    launch.backward(torch.empty_like(out), inputs, states, sums, options, inputs[:3])
        for few in short:
            with patch.object(triton.JITFunction, "run", partialmethod(note, preset=f"{few} tokens")):
                inputs = shapes(few, width)
                out, masses = softmax_forward(inputs, True)
                if backward and masses is not None:
                    softmax_backward(torch.empty_like(out), inputs, out, masses)
    return by_name


def depthwise_codes(capability: int, backward: bool = True) -> dict[str, Code]:
    """The same of depthwise convolutions of 64 images, as in stages of our networks at 224 px.

    Without gradients only those of one size, because several take longest to compile.
    """
    by_name: dict[str, Code] = {}

    def note(kernel: Any, *args: Any, name: str, **options: Any) -> Any:
        binary = compile_alone(kernel, *args, **options)
        of = "weights" if "TAPS" in options else "input" if options["FLIP"] else "gate"
        step = "forward" if of == "gate" and args[3] is None else f"backward to {of}"
        columns = options["NEAR"] * options["COLUMNS"] * options["CHANNELS"]
        by_name[f"{name} {step}"] = _code(binary, ("FFMA",), 32 * options["num_warps"] / columns)
        return binary

    with compiling(capability):
        compile_alone = triton.JITFunction.run
        for name, (work, channels, side) in CONVOLUTIONS.items():
            if not backward and len(work.kernels) > 1:
                continue
            given = operands(work, (64, channels, side, side), "meta")
            x, y, gate, weights, biases, grad = given.to(_dtype(capability))
            groups, around = [*map(len, work.kernels)], depthwise_launch.Around(y, gate, work.gelu, work.residual)
            with patch.object(triton.JITFunction, "run", partialmethod(note, name=name)):
                depthwise_launch.depthwise_forward(x, weights, biases, groups, around)
                if backward:
                    depthwise_launch.all_gradients(
                        grad, x, weights, biases, *around[:2], groups, *around[2:], True, True
                    )
    return by_name


def product_codes(capability: int) -> dict[str, Code]:
    """The same of layers with what surrounds them, as in stages of our networks at 224 px: 64 images in bfloat16."""
    by_name: dict[str, Code] = {}

    def note(kernel: Any, *args: Any, name: str, **options: Any) -> Any:
        binary = compile_alone(kernel, *args, **options)
        by_name[name] = _code(binary, ("HGMMA", "HMMA"), binary.metadata.num_warps)
        return binary

    with compiling(capability):
        compile_alone = triton.JITFunction.run
        for name, (layer, side) in PRODUCTS.items():
            given = product.cast_to(_dtype(capability), product.operands(layer, (64, side, side), "meta"))
            with patch.object(triton.JITFunction, "run", partialmethod(note, name=name)):
                product_launch.product_forward(**given)
    return by_name


def _dtype(capability: int) -> torch.dtype:
    return torch.bfloat16 if capability >= 80 else torch.float16


def shapes(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> launch.Inputs:
    """Tensors without memory, heads outermost."""
    query, key, value = (torch.empty(64, 8, tokens, width, dtype=dtype, device="meta") for _ in range(3))
    tables = torch.empty(tokens, width // 2, device="meta"), torch.empty(tokens, width // 2, device="meta")
    return launch.Inputs(query, key, value, tables, None, None, None)


def _code(binary: Any, products: tuple[str, ...], work: float) -> Code:
    """products: the instructions of which the main loop has most. work: by which its instructions are multiplied."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", file))
        listing = map(INSTRUCTION.match, _cuobjdump("--dump-sass", file).splitlines())
    assert usage is not None
    instructions = [(int(match[1], 16), match[2], match[3]) for match in listing if match]
    loops = []
    for address, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            loops.append([each for at, each, _ in instructions if int(target[1], 16) <= at <= address])
    # The first loop that has most products: the others are for the last tokens, or exponents out of range.
    main = max(
        loops or [[name for _, name, _ in instructions]],
        key=lambda loop: sum(name.startswith(products) for name in loop),
    )
    barriers = sum(name.startswith("BAR") for name in main)
    return Code(int(usage[1]), int(usage[2]), barriers, math.ceil(len(main) * work))


def _cuobjdump(option: str, file: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:] or ["90"]):
        by_name = codes(capability) | depthwise_codes(capability)
        if capability >= 80:
            by_name |= product_codes(capability)
        for name, code in by_name.items():
            print(f"{capability / 10} {name}: [{', '.join(map(str, code))}]", flush=True)

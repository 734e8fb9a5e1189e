"""What the card gives (copies, launches, issue rate), and where the time of networks goes: profiles and counters."""

import csv
import itertools
import shutil
import subprocess
import sys
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from evidence.gpu.carry import ROOT
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import BASE, CODE, DEVICE, OURS, TOYS, Network, build_call, medians
from linvit.ops import mala, rotary_2d

HERE = ("evidence/gpu/ceilings.py",)
CHAINS, UNROLLED = tl.constexpr(8), tl.constexpr(32)
COPIES = ((64, 64), (64, 256), (64, 512), (64, 2048), (128, 512), (128, 2048), (256, 2048))  # numbers, from row to row
PROFILED = {**dict.fromkeys(OURS, "fused+bf16+triton"), BASE: "bf16", "convnext_tiny": "fused+channels_last+bf16"}
TILE, LISTED, SHOWN = 64, 40, 8  # rows that a program copies; kernels of a profile in its row, and in the table
SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats")  # of ncu
COUNTERS = ("gpu__time", "dram__bytes", "lts__t_b", "sm__", "launch__reg", "smsp__average_warps_issue_stalled")


@triton.jit
def copy_rows(x, y, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offset = row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(y + offset, tl.load(x + offset))


@triton.jit
def nothing(x):
    pass


@triton.jit
def cycle(CLOCK: tl.constexpr):
    if CLOCK:
        now = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.full((), 0, tl.int64)
    return now


@triton.jit
def multiply_add(x, cycles, steps, THREADS: tl.constexpr, CLOCK: tl.constexpr):
    """CHAINS independent multiply-adds per thread, UNROLLED × steps times, and the cycles that they took."""
    values = tl.load(x + tl.arange(0, THREADS * CHAINS))
    begin = cycle(CLOCK)
    for _ in range(steps):
        for _ in tl.static_range(UNROLLED):
            values = tl.fma(values, 0.999, 0.5)
    total = tl.sum(values, 0)  # before the clock is read again
    took = cycle(CLOCK) - begin
    tl.store(cycles + tl.program_id(0), tl.where(total == 1.5, 0, took))


def cases(toy: bool) -> list[Case]:
    listed = []
    for (width, stride), mebibytes in itertools.product(COPIES[: 1 if toy else None], (8, 1024)):
        name = f"copy of rows of {2 * width} bytes, {2 * stride} bytes apart, {mebibytes} MiB"
        listed.append(Case(name, partial(copy_of_rows, width, stride, mebibytes, toy), HERE))
    listed += [Case("launches in a graph", partial(launches, toy), HERE), Case("issue rate", partial(issue, toy), HERE)]
    for name, variant in list(PROFILED.items())[: 1 if toy else None]:
        code = CODE if name in OURS else ("timm",)
        listed.append(Case(f"profile of {name} {variant}, 64 images", partial(profile, name, variant, toy), code))
    return [*listed, Case("counters of summarize and read", partial(counters, toy), ("linvit/kernels",))]


def copy_of_rows(width: int, stride: int, mebibytes: int, toy: bool) -> Results:
    """Rows of bfloat16 numbers, so many apart, as heads lie inside tokens; with nothing between them, torch's copy."""
    tiles = 1 if toy else mebibytes * 2**20 // (2 * width * TILE)
    x = torch.ones(tiles * TILE, stride, device=DEVICE[toy], dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    copy = partial(copy_rows[(tiles,)], x, y, stride, ROWS=TILE, WIDTH=width)
    size, calls, table = 2 * tiles * TILE * width, {f"{2 * width} bytes of every {2 * stride}": copy}, []
    if stride == width:
        calls["contiguous, torch"] = partial(y.copy_, x)
    for words, call in calls.items():
        y.zero_()
        call()
        if not bool((y[:, :width] == 1).all()):
            raise ArithmeticError("the copy is wrong")
        ms = medians({"copy": call}, toy)["copy"]
        table.append({"copy": words, "MiB": size / 2**20, "ms": ms, "TB/s read and written": 2 * size / ms / 1e9})
    return {"cells": table}


def launches(toy: bool) -> Results:
    """Microseconds of 1, 10 and 100 kernels that do nothing, one after another in a graph, with and without overlap."""
    x = torch.zeros(1, device=DEVICE[toy])

    def start(number: int, **options: bool) -> Tensor:
        for _ in range(number):
            nothing[(1,)](x, **options)
        return x

    calls = {f"{number}": partial(start, number) for number in ((1, 2) if toy else (1, 10, 100))}
    if not toy:
        calls |= {f"{number}, dependent launch": partial(start, number, launch_pdl=True) for number in (10, 100)}
    return {"cells": [{"kernels that do nothing": name, "µs": 1000 * ms} for name, ms in medians(calls, toy).items()]}


def issue(toy: bool) -> Results:
    """Multiply-adds that a multiprocessor issues per cycle (at most 4 warps' at once), with so many warps."""
    programs = 1 if toy else torch.cuda.get_device_properties(0).multi_processor_count
    steps, table = 1 if toy else 200, []
    for warps in (4,) if toy else (4, 8, 16, 32):
        x = torch.rand(32 * warps * CHAINS.value, device=DEVICE[toy])
        cycles = torch.zeros(programs, dtype=torch.int64, device=DEVICE[toy])
        for _ in range(2):
            multiply_add[(programs,)](x, cycles, steps, THREADS=32 * warps, CLOCK=not toy, num_warps=warps)
        issued = steps * UNROLLED.value * CHAINS.value * warps
        rate = None if toy else issued / cycles.double().median().item()
        table.append({"warps": warps, "multiply-adds issued per cycle": rate})
    return {"cells": table}


def profile(name: str, variant: str, toy: bool) -> Results:
    """The kernels of one call of a network by time: name, starts, microseconds; and the time of the call itself."""
    toys, real = Network(TOYS["ravlt_tiny"], "fused+bf16", (32, 32), 2), Network(name, variant, (224, 224), 64, "cuda")
    call = build_call(toys if toy else real)
    activity = torch.profiler.ProfilerActivity.CPU if toy else torch.profiler.ProfilerActivity.CUDA
    with torch.inference_mode():
        ms = medians({"call": call}, toy)["call"]
        with torch.profiler.profile(activities=[activity]) as recorded:
            call()
            if not toy:
                torch.cuda.synchronize()
    time_of = "self_cpu_time_total" if toy else "self_device_time_total"
    events = [(event.key[:120], event.count, getattr(event, time_of)) for event in recorded.key_averages()]
    kernels = sorted((kernel for kernel in events if kernel[2]), key=lambda kernel: -kernel[2])
    starts, us = (sum(column) for column in list(zip(*kernels, strict=True))[1:])
    whole = {"network": name, "variant": variant, "ms in a graph": ms, "kernels": starts, "ms in kernels": us / 1000}
    table = [dict(zip(("kernel", "starts", "µs"), kernel, strict=True)) for kernel in kernels]
    return {"cells": [whole, *({"network": name, **row} for row in table[:SHOWN])], "kernels": table[:LISTED]}


def counters(toy: bool) -> Results:
    """Hardware counters of MALA's kernels in bfloat16, 64 × 8 heads of 12,544 tokens; why, if there are none."""
    if toy or shutil.which("ncu") is None:
        return {"cells": [{"counters": "none: ncu is not installed"}]}
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--kernel-name", "regex:summarize|read"]
    command += [f"--section={name}" for name in SECTIONS]
    command += [sys.executable, "-c", "from evidence.gpu.ceilings import call_once; call_once()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(rows) < 2:
        return {"cells": [{"counters": f"none: {(done.stderr + done.stdout).strip()[-300:]}"}]}
    units, *kernels = rows
    values = {name: {row["Kernel Name"].split("(")[0]: row[name] for row in kernels} for name in units}
    table = [{"counter": f"{name} {units[name]}"} | values[name] for name in units if name.startswith(COUNTERS)]
    return {"cells": table}


def call_once() -> None:
    """What `counters` runs under ncu."""
    q, k, v = (torch.randn(64, 8, 12544, 64, device="cuda").bfloat16() for _ in range(3))
    mala(q, k, v, rotary=rotary_2d((112, 112), 64, device=torch.device("cuda")), backend="triton")
    torch.cuda.synchronize()

"""Timing of calls in turn (A, B, C, A, B, C, …) after a warm-up, so that a slowdown affects all of them alike."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

Call = Callable[[], object]
TensorsCall = Callable[[], Sequence[torch.Tensor]]  # of which results can be checked
LEAST_SECONDS = 0.02  # a shorter call is repeated within its turn
MOST_REPEATS = 500
SLOW_SECONDS = 1.0  # one call warms up a longer one
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class HostClock:
    """CPU time of this process (all its threads), or wall time."""

    name: str
    now: Callable[[], float]

    def prepared(self, call: Call) -> Call:
        """The call in the form that is timed."""
        return call

    def seconds(self, call: Call, repeats: int) -> float:
        """Mean time of one call over `repeats` calls in a row."""
        start = self.now()
        for _ in range(repeats):
            call()
        return (self.now() - start) / repeats


@dataclass(frozen=True)
class CudaClock:
    """Time on the GPU between two events, with `graphs` the calls are replayed from a CUDA graph.

    The graphs of one clock share the memory of what their calls do not return: each replay overwrites it.
    """

    graphs: bool = True
    name: str = "gpu"

    @cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def prepared(self, call: Call) -> Call:
        if not self.graphs:
            return call
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            kept = call()  # a graph overwrites its outputs: they have to live as long as it

        def replay() -> object:
            graph.replay()
            return kept

        return replay

    def seconds(self, call: Call, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000 / repeats


Clock = HostClock | CudaClock


def clock_for(device: str, threads: int, graphs: bool = True) -> Clock:
    """CPU time for one thread, wall time for more, events on a GPU."""
    if device != "cpu":
        return CudaClock(graphs)
    return HostClock("cpu", time.process_time) if threads == 1 else HostClock("wall", time.perf_counter)


@dataclass
class Timing:
    """Seconds of one call, one entry per round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)

    @property
    def spread_ms(self) -> float:
        """Interquartile range: the middle half of the rounds lies within it; 0 for one round."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return 1000 * (high - low)

    def ratio_to(self, base: "Timing") -> float:
        """How many times as fast as base: the median over rounds of base's time over this one's, round by round."""
        return statistics.median(other / seconds for seconds, other in zip(self.seconds, base.seconds, strict=False))


def interleave(
    calls: Mapping[str, Call],
    clock: Clock,
    rounds: int,
    timings: dict[str, Timing],
    after_round: Callable[[], object] = lambda: None,
    most_seconds: float = math.inf,
) -> None:
    """Times every call once per round, into timings, which keep the complete rounds if they are interrupted.

    Rounds end early, but not before LEAST_ROUNDS, once most_seconds of wall time have passed.
    """
    began = time.perf_counter()
    prepared = {name: clock.prepared(call) for name, call in calls.items()}
    repeats = {}
    for name, call in prepared.items():
        took = clock.seconds(call, 1)
        if took < SLOW_SECONDS:
            took = clock.seconds(call, 1)
        repeats[name] = min(MOST_REPEATS, math.ceil(LEAST_SECONDS / max(took, 1e-9)))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.perf_counter() - began > most_seconds:
                break
            taken = {name: clock.seconds(call, repeats[name]) for name, call in prepared.items()}
            for name, seconds in taken.items():
                timings.setdefault(name, Timing()).seconds.append(seconds)
            after_round()
    finally:
        if collecting:
            gc.enable()


@contextmanager
def exact_float32() -> Iterator[None]:
    """Turns TF32 off, in which GPUs multiply float32 by default in convolutions, and restores it afterwards.

    With it a network in float32 has errors of 1e-3, which would hide a mistake.
    """
    settings: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, allowed in zip(settings, before, strict=True):
            setting.allow_tf32 = allowed

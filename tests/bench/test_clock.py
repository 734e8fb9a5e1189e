"""Turns, medians and spreads on a clock with fixed times."""

import gc

import pytest
import torch

from linvit.bench.clock import HostClock, Timing, clock_for, exact_float32, interleave


class Told:
    """A clock on which every call takes what its result says, in seconds; notes the order of the calls."""

    name = "fixed"

    def __init__(self):
        self.order = []

    def prepared(self, call):
        return call

    def seconds(self, call, repeats):
        took = call()
        self.order.append((took, repeats))
        return took


def test_turns_are_interleaved_after_a_warm_up():
    clock, timings = Told(), {}
    interleave({"a": lambda: 2.0, "b": lambda: 0.004}, clock, 3, timings)
    assert clock.order == [(2.0, 1), (0.004, 1), (0.004, 1), *[(2.0, 1), (0.004, 5)] * 3]
    assert timings["a"].seconds == [2.0] * 3
    assert timings["b"].ratio_to(timings["a"]) == 500


def test_median_and_interquartile_range():
    timing = Timing([0.001, 0.002, 0.003, 0.004, 0.1])
    assert timing.median_ms == pytest.approx(3)
    assert timing.spread_ms == pytest.approx(2)
    assert Timing([0.5]).spread_ms == 0


def test_the_ratio_is_of_the_same_rounds():
    slowed_down = Timing([1.0, 10.0, 1.0]), Timing([2.0, 20.0, 2.2])
    assert slowed_down[0].ratio_to(slowed_down[1]) == 2


def test_an_interrupted_measurement_keeps_whole_rounds():
    timings, calls = {}, iter([2.0, 2.0, 2.0, KeyboardInterrupt])

    def second():
        value = next(calls)
        if value is KeyboardInterrupt:
            raise value
        return value

    with pytest.raises(KeyboardInterrupt):
        interleave({"a": lambda: 2.0, "b": second}, Told(), 5, timings)
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]
    assert gc.isenabled()


def test_a_bound_on_seconds_leaves_three_rounds():
    timings = {}
    interleave({"a": lambda: 2.0}, Told(), 9, timings, most_seconds=-1.0)
    assert len(timings["a"].seconds) == 3


def test_one_thread_is_measured_in_cpu_time():
    assert clock_for("cpu", 1).name == "cpu"
    assert clock_for("cpu", 2).name == "wall"
    assert clock_for("cuda", 1).name == "gpu"
    ticks = iter([1.0, 4.0])
    assert HostClock("cpu", lambda: next(ticks)).seconds(lambda: None, 3) == 1.0


def test_float32_is_exact_while_something_is_measured():
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [setting.allow_tf32 for setting in settings]
    with exact_float32():
        assert not any(setting.allow_tf32 for setting in settings)
    assert [setting.allow_tf32 for setting in settings] == before


@pytest.mark.gpu
def test_a_graph_gives_what_the_call_gives():
    from linvit.bench.clock import CudaClock

    x = torch.randn(1000, device="cuda")
    replay = CudaClock().prepared(lambda: (2 * x,))
    assert torch.equal(replay()[0], 2 * x)
    assert CudaClock().seconds(replay, 10) > 0

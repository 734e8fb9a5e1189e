"""A process that times on the GPU is alone, waits for others, and never for itself."""

import subprocess
import sys
import threading

import pytest

from tools.gpu import turns

TRY = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free")
except BlockingIOError:
    print("held")
"""
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def seen_by_another(lock):
    """What another process finds: "free" or "held"."""
    return subprocess.run([sys.executable, "-c", TRY, str(lock)], capture_output=True, text=True).stdout.strip()


@pytest.fixture(params=["TritonBenchmarker", "InductorBenchmarker"])
def timer(request, monkeypatch, tmp_path):
    """Inductor's timer with the lock, which runs what it should time once, as there is no GPU."""
    benchmarking = pytest.importorskip("torch._inductor.runtime.benchmarking", reason="this PyTorch has no inductor")
    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):
        monkeypatch.setattr(benchmarking, "_gpu_benchmark_lock_context", None)
        time = benchmarking.gpu_benchmark_lock(lambda self, call: call())
    else:
        time = lambda self, call: call()  # noqa: E731
    for name in ("Benchmarker", "TritonBenchmarker", "InductorBenchmarker"):
        monkeypatch.setattr(getattr(benchmarking, name), "benchmark_gpu", time)
    turns.lock_autotuning(tmp_path / "lock")
    return getattr(benchmarking, request.param)().benchmark_gpu


def test_a_timing_holds_the_lock(timer, tmp_path):
    assert timer(lambda: seen_by_another(tmp_path / "lock")) == "held"
    assert seen_by_another(tmp_path / "lock") == "free"


def test_a_failed_timing_releases_the_lock(timer, tmp_path):
    with pytest.raises(ZeroDivisionError):
        timer(lambda: 1 / 0)
    assert seen_by_another(tmp_path / "lock") == "free"


def test_a_timing_waits_for_another_process(timer, tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    times = []
    waiting = threading.Thread(target=timer, args=[lambda: times.append(1)])
    waiting.start()
    waiting.join(0.3)
    assert not times
    other.communicate("\n")
    waiting.join(30)
    assert times


def test_blocks_of_one_process_do_not_wait_for_each_other(timer, tmp_path):
    found = []
    with turns.alone(tmp_path / "lock"):
        timer(lambda: found.append(seen_by_another(tmp_path / "lock")))
        inner = threading.Thread(target=timer, args=[lambda: found.append(seen_by_another(tmp_path / "lock"))])
        inner.start()
        inner.join(30)
        found.append(seen_by_another(tmp_path / "lock"))
    assert found == ["held"] * 3
    assert seen_by_another(tmp_path / "lock") == "free"


def test_a_pytorch_that_times_elsewhere_is_reported(monkeypatch, tmp_path):
    benchmarking = pytest.importorskip("torch._inductor.runtime.benchmarking", reason="this PyTorch has no inductor")
    for name in [name for name, x in vars(benchmarking).items() if isinstance(x, type) and "benchmark_gpu" in vars(x)]:
        monkeypatch.delattr(benchmarking, name)
    monkeypatch.delattr(benchmarking, "set_gpu_benchmark_lock_context", raising=False)
    with pytest.warns(UserWarning, match="no `benchmark_gpu` in this PyTorch"):
        turns.lock_autotuning(tmp_path / "lock")

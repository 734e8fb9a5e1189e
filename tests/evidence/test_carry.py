"""What is packed arrives, what is too large is named, and what one machine has compiled another one reads."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from evidence.gpu import carry

ROOT = Path(__file__).parents[2]
compiler = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.backends.nvidia") is None,
    reason="no Triton that compiles for CUDA",
)
native = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
# Another build of Triton and another assembler, as far as keys know: argument 2. linvit without the imports of its
# networks, which take longer than everything else here.
LAUNCH = """
import sys
from pathlib import Path
from types import ModuleType
import torch
sys.modules["linvit"] = ModuleType("linvit")
sys.modules["linvit"].__path__ = [str(Path("linvit").resolve())]
import triton.backends.nvidia.compiler
from evidence.gpu import carry

triton.runtime.cache.triton_key = lambda: sys.argv[2]
triton.backends.nvidia.compiler.get_ptxas_version = lambda arch: sys.argv[2]
carry.share_triton_cache(Path(sys.argv[1]))
from linvit.kernels import launch
from evidence.gpu.machine_code import compiling

with compiling(90) as counts:
    query, key, value = (torch.empty(8, 8, 1100, 16, dtype=torch.bfloat16, device=sys.argv[3]) for _ in range(3))
    inputs = launch.Inputs(query, key, value, (None, None), None, None, None)
    launch.forward(inputs, launch.Options("elu1", "elu1", False, "divide", 1e-6))
print(counts["compiled"], counts["read"])
"""


def launched(folder, build, device):
    """Counts of kernels compiled and read by a new process."""
    command = [sys.executable, "-c", LAUNCH, str(folder), build, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return [int(count) for count in done.stdout.split()]


@pytest.mark.slow
@compiler
@native
def test_another_build_in_another_folder_reads_what_was_compiled(tmp_path):
    compiled, read = launched(tmp_path / "here", "cp311", "meta")
    assert compiled >= 2
    assert read == 0
    shutil.move(tmp_path / "here", tmp_path / "there")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*.cubin")}
    assert launched(tmp_path / "there", "cp312", "cpu") == [0, compiled]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*.cubin")} == before
    assert not (tmp_path / "here").exists()


@compiler
@native
def test_everything_is_put_back(tmp_path):
    import triton

    from evidence.gpu.machine_code import compiling
    from linvit.kernels import launch

    def state():
        found = triton.JITFunction.run, triton.runtime.driver._active, launch._stages, launch.processors
        return *found, triton.knobs.compilation.listener

    before = state()
    with contextlib.suppress(ZeroDivisionError), compiling(90):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before


@pytest.fixture
def carried(tmp_path, monkeypatch):
    """build/gpu elsewhere, with caches of 300 KiB that cannot be compressed."""
    monkeypatch.setattr(carry, "CARRIED", tmp_path / "gpu")
    for name in ("inductor", "triton"):
        (tmp_path / "gpu" / name / "deep").mkdir(parents=True)
        (tmp_path / "gpu" / name / "deep" / "code").write_bytes(os.urandom(150 * 1024))
    (tmp_path / "sweep.jsonl").write_text("{}")
    return tmp_path


def test_caches_come_back_in_pieces_and_are_there_the_next_time(carried, monkeypatch):
    out, gpu = carried / "out dir", carried / "gpu"
    before = {path: path.read_bytes() for path in gpu.rglob("code")}
    for _ in range(2):
        carry.pack(out)
    assert [path.name for path in out.iterdir()] == ["caches.tar.xz.00"]
    for path in before:
        path.unlink()
    shutil.move(out / "caches.tar.xz.00", gpu)
    carry.unpack()
    assert {path: path.read_bytes() for path in gpu.rglob("code")} == before
    assert not list(gpu.glob("caches*"))
    carry.unpack()


def test_caches_that_are_too_large_do_not_come_back(carried, monkeypatch, capsys):
    monkeypatch.setattr(carry, "PIECES", 0)
    carry.pack(carried / "out dir")
    assert list((carried / "out dir").iterdir()) == []
    assert "The caches need 1 pieces, of at most 0" in capsys.readouterr().out


def test_what_is_prepared_is_packed_beside_the_commit_and_counted(carried, monkeypatch):
    gpu = carried / "gpu"
    monkeypatch.setattr(carry, "COMMIT", gpu / "commit")
    monkeypatch.setattr(carry, "share_triton_cache", lambda folder: None)
    before = {path: path.read_bytes() for path in gpu.rglob("code")}
    for _ in range(2):
        assert carry.prepare([]) == "build/gpu has 0.3 MiB, of at most 40"
    assert sorted(path.name for path in gpu.iterdir()) == ["caches.tar.xz.00", "commit"]
    carry.unpack()
    assert {path: path.read_bytes() for path in gpu.rglob("code")} == before
    monkeypatch.setattr(carry, "TRAVELS", 0)
    with pytest.raises(ValueError, match="remove what the next jobs do not need"):
        carry.prepare([])


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
    for name in ("Benchmarker", "TritonBenchmarker", "InductorBenchmarker"):
        monkeypatch.setattr(getattr(benchmarking, name), "benchmark_gpu", lambda self, call: call())
    carry.lock_autotuning(tmp_path / "lock")
    return getattr(benchmarking, request.param)().benchmark_gpu


def test_a_timing_holds_the_lock_and_releases_it(timer, tmp_path):
    assert timer(lambda: timer(lambda: seen_by_another(tmp_path / "lock"))) == "held"
    assert seen_by_another(tmp_path / "lock") == "free"
    with pytest.raises(ZeroDivisionError):
        timer(lambda: 1 / 0)
    assert seen_by_another(tmp_path / "lock") == "free"


def test_a_timing_waits_for_another_process(timer, tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    times = []
    waiting = threading.Thread(target=timer, args=[lambda: times.append(1)])
    waiting.start()
    waiting.join(0.3)
    assert not times
    other.communicate("\n")
    waiting.join(30)
    assert times

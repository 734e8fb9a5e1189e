"""What is packed arrives, what is too large is named, and what one machine has compiled another one reads."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tools.gpu import carry

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
from tools.gpu import carry

triton.runtime.cache.triton_key = lambda: sys.argv[2]
triton.backends.nvidia.compiler.get_ptxas_version = lambda arch: sys.argv[2]
carry.share_triton_cache(Path(sys.argv[1]))
from linvit.kernels import launch

with carry.compiling(90) as counts:
    query, key, value = (torch.empty(64, 8, 49, 16, dtype=torch.bfloat16, device=sys.argv[3]) for _ in range(3))
    inputs = launch.Inputs(query, key, value, (None, None), None, None)
    launch.forward(inputs, launch.Options("elu1", "elu1", False, "divide", 1e-6))
print(counts["compiled"], counts["read"])
"""


def launched(folder, build, device):
    """Counts of kernels compiled and read by a new process."""
    command = [sys.executable, "-c", LAUNCH, str(folder), build, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return [int(count) for count in done.stdout.split()]


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
def test_stages_shrink_as_on_the_machine_and_everything_is_put_back(tmp_path, monkeypatch):
    import triton

    from linvit.kernels import launch

    def state():
        return (
            triton.JITFunction.run,
            triton.runtime.driver._active,
            launch._stages,
            launch._processors,
            triton.knobs.compilation.listener,
        )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(carry, "SHARED", {90: 1})
    before = state()
    query = torch.empty(64, 8, 49, 16, dtype=torch.bfloat16, device="meta")
    inputs = launch.Inputs(query, query, query, (None, None), None, None)
    with carry.compiling(90) as counts, pytest.raises(triton.runtime.errors.OutOfResources):
        launch.forward(inputs, launch.Options("elu1", "elu1", False, "divide", 1e-6))
    assert counts == {"compiled": launch.MOST_STAGES, "read": 0}
    assert state() == before


def test_kernels_are_not_compiled_where_triton_interprets(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from linvit.kernels import launch

    monkeypatch.setattr(launch, "interpreted", lambda: True)
    with pytest.raises(ValueError, match="unset it before Python starts"), carry.compiling(90):
        pass


@pytest.fixture
def packed(tmp_path):
    """A folder, and its three pieces."""
    folder = tmp_path / "cache"
    (folder / "deep" / "empty").mkdir(parents=True)
    (folder / "deep" / "noise").write_bytes(os.urandom(2 * carry.MEBIBYTE + 17))
    (folder / "name").write_text("κ")
    return folder, carry.pack(folder, tmp_path / "out", 1)


def test_a_folder_arrives_in_pieces(packed, tmp_path):
    folder, pieces = packed
    assert [piece.name for piece in pieces] == [f"cache.tar.xz.0{number}" for number in range(3)]
    assert max(piece.stat().st_size for piece in pieces) == carry.MEBIBYTE
    assert set(pieces[0].parent.iterdir()) == set(pieces)
    carry.unpack(tmp_path / "out" / "cache.tar.xz", tmp_path / "arrived")
    names = {path.relative_to(folder) for path in folder.rglob("*")}
    assert names == {path.relative_to(tmp_path / "arrived") for path in (tmp_path / "arrived").rglob("*")}
    for name in names:
        if (folder / name).is_file():
            assert (folder / name).read_bytes() == (tmp_path / "arrived" / name).read_bytes()


def test_packing_again_leaves_no_old_piece(packed, tmp_path):
    folder, pieces = packed
    (folder / "deep" / "noise").unlink()
    assert carry.pack(folder, tmp_path / "out", 1) == pieces[:1]
    assert list((tmp_path / "out").iterdir()) == pieces[:1]
    carry.unpack(tmp_path / "out" / "cache.tar.xz", tmp_path / "arrived")
    assert (tmp_path / "arrived" / "name").read_text() == "κ"


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1, 2]])
def test_a_lost_piece_is_named(packed, tmp_path, lost):
    _, pieces = packed
    for number in lost:
        pieces[number].unlink()
    left = ", ".join(piece.name for number, piece in enumerate(pieces) if number not in lost) or "none"
    with pytest.raises(ValueError, match=rf"not complete \(pieces found: {left}\): copy"):
        carry.unpack(tmp_path / "out" / "cache.tar.xz", tmp_path / "arrived")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a plain copy, in which git lists no files")
def test_too_much_to_travel_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(carry, "CARRIED", ROOT / "build" / "gpu" / "nothing")
    size = carry.check_size(1000)
    assert size > 1
    with pytest.raises(
        ValueError, match=rf"{size:.1f} MiB would travel, and at most 0.5 fit; the largest parts are \w"
    ):
        carry.check_size(0.5)
    monkeypatch.setattr(carry, "ROOT", tmp_path)
    monkeypatch.setattr(carry, "CARRIED", tmp_path / "build" / "gpu")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("/build/")
    (tmp_path / "build" / "gpu" / "cache" / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "build" / "gpu" / "cache" / "deep" / "deeper" / "file").write_bytes(bytes(3 * carry.MEBIBYTE))
    (tmp_path / "build" / "other").write_bytes(bytes(carry.MEBIBYTE))
    (tmp_path / "new").write_bytes(bytes(carry.MEBIBYTE))
    assert round(carry.check_size(5), 3) == 4
    with pytest.raises(ValueError, match=r"4.0 MiB .* are build/gpu/cache 3.0, new 1.0, .* remove from build/gpu"):
        carry.check_size(3)

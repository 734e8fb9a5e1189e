"""What a user has after `pip install`, in an empty folder: built, installed and used without the checkout."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "explorer"
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
SHORT += ["trainer.accelerator=cpu", "trainer.precision=32-true"]
PACKAGED = (".py", ".cpp", ".h", ".typed", ".json", ".yaml", ".safetensors", ".md", ".bib")
PACKAGED += (".html", ".css", ".js", ".svg")
pytestmark = pytest.mark.slow


def call(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    (path,) = folder.glob("linvit-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a program of a fresh environment, which has the wheel and sees the libraries of this one, in any folder."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(program, *arguments, cwd):
        return call(folder / "bin" / program, *arguments, cwd=cwd, env=environment)

    run("python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return run


def test_the_wheel_holds_everything(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "linvit").rglob("*") if path.suffix in PACKAGED]
    assert len(files) > 200
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names
    recipes = {f"linvit/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {name for name in names if name.startswith("linvit/recipes/")} == recipes
    assert any(name.endswith("licenses/LICENSE") for name in names)
    built = {
        f"linvit/explorer/built/{path.relative_to(BUILT).as_posix()}" for path in BUILT.rglob("*") if path.is_file()
    }
    assert built <= names
    weights = [info for info in zipfile.ZipFile(wheel).infolist() if info.filename.endswith(".safetensors")]
    assert sum(info.file_size for info in weights) < 4e6
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_recipes_train_and_new_work_in_an_empty_folder(installed, tmp_path):
    module = Path(installed("python", "-c", "import linvit; print(linvit.__file__)", cwd=tmp_path).strip())
    assert "site-packages" in module.parts
    assert not module.is_relative_to(ROOT)
    assert "demo/ravlt_nano_digits" in installed("linvit", "recipes", "demo", cwd=tmp_path)
    installed("linvit", "train", "demo/ravlt_nano_digits", *SHORT, cwd=tmp_path)
    assert (tmp_path / "runs" / "ravlt_nano_digits" / "checkpoints" / "last.ckpt").is_file()
    generator = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    installed("linvit", "new", "my.yaml", "--model", "mavit_nano", "--data", "photos", cwd=tmp_path)
    installed("linvit", "train", "my.yaml", *SHORT, cwd=tmp_path)
    assert "top-1" in installed("linvit", "eval", "runs/my", cwd=tmp_path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
def test_a_wheel_with_compiled_kernels_needs_no_compiler(installed, tmp_path):
    build = ("-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path)
    call(sys.executable, *build, env={**os.environ, "LINVIT_PREBUILT": "1"})
    (wheel,) = tmp_path.glob("linvit-*.whl")
    assert wheel.stem.endswith(sysconfig.get_platform().replace("-", "_"))
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    assert len(libraries) == (2 if platform.machine() == "x86_64" else 1)
    code = (
        "import os; os.environ.update(CXX='none', PYTHONPATH=''); import torch, linvit; from linvit.kernels import cpu;"
        "from linvit.ops import rala; x = torch.randn(3, 1, 2, 50, 16); found = rala(*x); assert cpu.ready();"
        "assert torch.equal(found, rala(*x, backend='cpp'));"
        "assert torch.allclose(found, rala(*x, backend='torch'), atol=1e-5); print(linvit.__file__)"
    )
    assert str(tmp_path / "site") in installed("python", "-c", code, cwd=tmp_path / "site")


def test_the_demo_finds_its_recipes_and_the_evidence_stays_out(installed, tmp_path):
    code = (
        "from importlib.util import find_spec;"
        "from linvit.bundled import bundled_folder;"
        "print(len(list((bundled_folder() / 'demo').glob('*_nano_digits.yaml'))), find_spec('evidence'))"
    )
    assert installed("python", "-c", code, cwd=tmp_path) == "4 None\n"


@pytest.mark.skipif(not (BUILT / "runtime" / "LICENSE").is_file(), reason="`make explorer` has not built it here")
def test_the_explorer_is_installed_too(installed, tmp_path):
    assert "index.html" in installed("linvit", "explore", "--write", "page", cwd=tmp_path)
    assert (tmp_path / "page" / "runtime" / "ThirdPartyNotices.txt").is_file()

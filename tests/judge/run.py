"""Runs timm's own model tests, unedited, on the models of linvit: `python tests/judge/run.py [PATTERN …]`.

The tests come with the source distribution of exactly the installed timm, which pip fetches into build/judge once.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "judge"


def timm_source() -> Path:
    """The folder of timm's unpacked source distribution; SystemExit with one sentence if it cannot be fetched."""
    name = f"timm-{version('timm')}"
    source = FOLDER / name
    if source.is_dir():
        return source
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        # Without isolation pip takes timm's build backend, which it wants for the metadata, from the environment.
        fetch = ["download", name.replace("-", "=="), "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *fetch, "--quiet", "--dest", temporary], capture_output=True, text=True
        )
        archive = Path(temporary) / f"{name}.tar.gz"
        if done.returncode or not archive.is_file():
            reason = (done.stderr.strip() or "no archive").splitlines()[-1]
            sys.exit(
                f"make judge: the source distribution of {name} could not be fetched ({reason}): "
                f"unpack {archive.name} by hand as {source.relative_to(ROOT)} or try again with a network"
            )
        with tarfile.open(archive) as packed:
            packed.extractall(temporary, filter="data")
        os.replace(Path(temporary) / name, source)
    return source


def main(patterns: list[str]) -> int:
    """Judges the models whose names fit a pattern (none: all of them) and returns pytest's exit status."""
    source = timm_source()
    environment = {key: value for key, value in os.environ.items() if key != "GITHUB_ACTIONS"}  # it shortens the suite
    paths = [str(HERE), str(ROOT), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--durations=5"]
    command = [sys.executable, "-m", "pytest", "-p", "linvit_names", "-n", "auto", *quiet, f"--rootdir={source}"]
    names = [f"--names={pattern}" for pattern in patterns]
    return subprocess.run([*command, *names, source / "tests" / "test_models.py"], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

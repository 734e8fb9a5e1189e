"""Puts what has been built into the wheel: the explorer, if `make explorer` has built it, and compiled CPU kernels.

Kernels are compiled if LINVIT_PREBUILT=1 is set; without it the wheel works everywhere. With LINVIT_RELEASE=1 a wheel
without the explorer is refused.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXPLORER = ("index.html", "networks/networks.json", "runtime/LICENSE", "runtime/ThirdPartyNotices.txt")


class Built(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        explorer = Path(self.root) / "build" / "explorer"
        missing = [name for name in EXPLORER if not (explorer / name).is_file()]
        if missing and os.environ.get("LINVIT_RELEASE") == "1":
            raise FileNotFoundError(
                f"A released wheel has the explorer, but build/explorer lacks {missing[0]}: run `make explorer`."
            )
        if not missing and version != "editable":
            build_data["force_include"][str(explorer)] = "linvit/explorer/built"
        if os.environ.get("LINVIT_PREBUILT") == "1":
            self._compile(build_data)

    def _compile(self, build_data: dict[str, Any]) -> None:
        """Compiles for the torch of this environment, so pip needs --no-build-isolation."""
        folder = Path(self.root) / "build" / "prebuilt"
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "linvit.kernels.cpu.compiling", str(folder)], check=True, cwd=self.root)
        build_data["force_include"][str(folder)] = "linvit/kernels/cpu/prebuilt"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

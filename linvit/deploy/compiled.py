"""Networks compiled to machine code by AOTInductor, torch's own compiler: a .pt2 file for processors like this one."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linvit.deploy.facts import KEY
from linvit.deploy.runtime import Session, silent_stderr


def check_compiler() -> None:
    """Raises ImportError if there is no C++ compiler, which AOTInductor needs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ImportError(
            "AOTInductor needs a C++ compiler, but none was found: install g++ or clang, or name one in the environment"
            " variable CXX."
        ) from error


def write_compiled(
    program: ExportedProgram, facts: str, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Writes machine code, weights and facts, of which AOTInductor has a list of metadata."""
    with silent_stderr():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": {KEY: facts}}
        )


def open_compiled(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    """What a file that was just written says about itself, and its session. This runs the code in the file."""
    model = torch._inductor.aoti_load_package(str(path))

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(model(images))

    return model.get_metadata().get(KEY), run

"""Core ML files, written and checked on any system and run on macOS alone.

An .mlpackage is a folder. Its input is an image of Core ML, and it computes in float16, because Apple's Neural Engine
computes in nothing else.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from platform import system
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram

from linvit.deploy.facts import KEY
from linvit.deploy.runtime import Session, silent_stderr

PACKAGE = ".mlpackage"
MANIFEST = "Manifest.json"
"""The file that makes a folder a package of Core ML."""


def write_coreml(
    program: ExportedProgram, facts: str, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Writes a program on float32 images (1, channels, height, width) of 0..255, and checks what is written.

    Raises ValueError if the file does not have what was converted, or if a weight is too large for float16.
    """
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if tensor.is_floating_point() and not torch.equal(tensor.isfinite(), tensor.half().isfinite()):
            raise ValueError(f"the weight {name} is too large for float16")
    with silent_stderr():
        import coremltools as ct

        images: Tensor = program.example_inputs[0][0]
        layout = ct.colorlayout.RGB if images.shape[1] == 3 else ct.colorlayout.GRAYSCALE
        model = ct.convert(
            program.run_decompositions(DECOMPOSITIONS),
            inputs=[ct.ImageType("images", shape=tuple(images.shape), color_layout=layout)],
            outputs=[ct.TensorType(name, dtype=np.float32) for name in outputs],
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
        model.user_defined_metadata[KEY] = facts
        model.save(str(path))
        (path / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)  # of use to coremltools' debugger alone
        written = ct.models.MLModel(str(path), skip_model_load=True)
        if written.get_spec() != model.get_spec():
            raise ValueError("coremltools reads other operators from the file than it wrote")


def _alias(x: Tensor) -> Tensor:
    return x


def _addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
    return x + value * first * second


DECOMPOSITIONS: dict[OpOverload, Callable[..., Tensor]] = {  # of what coremltools does not know
    torch.ops.aten.addcmul.default: _addcmul,
    torch.ops.aten.alias.default: _alias,
}


def open_coreml(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session | None]:
    """What a file says about itself, and its session; None on systems other than macOS, which cannot run it."""
    runs = system() == "Darwin"
    with silent_stderr():
        import coremltools as ct

        model = ct.models.MLModel(str(path), skip_model_load=not runs)
    names = [output.name for output in model.get_spec().description.output]

    def run(images: Tensor) -> tuple[Tensor, ...]:
        pixels = images[0].movedim(0, -1).numpy()
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        values: dict[str, Any] = model.predict({"images": image})
        return tuple(torch.from_numpy(values[name]) for name in names)

    return model.user_defined_metadata.get(KEY), run if runs else None

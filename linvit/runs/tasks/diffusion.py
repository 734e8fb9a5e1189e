"""Runs of image generation."""

from typing import TYPE_CHECKING, Any, ClassVar

from linvit.data.generation.canvas import Canvas, DigitPictures
from linvit.data.generation.latents import Latents
from linvit.data.source import Source
from linvit.models.dit import create_dit
from linvit.runs.named import NamedSpec
from linvit.tasks.diffusion import Diffusion

if TYPE_CHECKING:
    from linvit.runs.run import Run


class DiffusionSpec(NamedSpec):
    """DiTs, of pixels or of latents."""

    name = "diffusion"
    task = Diffusion
    sources: ClassVar = {"digit_pictures": DigitPictures, "latents": Latents}
    folder_source = "latents"
    preprocessing = Canvas
    kept = ("generates", "sampler", "steps", "clips")
    create = staticmethod(create_dit)
    instead_of_predict = "call `generate`"

    def open_source(self, run: "Run", name: str, settings: dict[str, Any]) -> Source:
        if name == "latents" and run.preprocessing.decoder is None:
            raise ValueError("`root` is a folder, but this run generates the digits it was trained on: leave it out.")
        return self.create_source(name, settings)

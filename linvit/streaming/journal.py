"""What a streamed network has computed so far, so that it goes on after an interruption."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.files import read_checkpoint, replacing
from linvit.ops.state import State
from linvit.streaming.images import Image
from linvit.streaming.maps import Size
from linvit.streaming.strip import Total

PROGRESS = "progress.pt"
NOTED = ("key", "step", "strips", "shapes", "totals", "pool", "logits")


class Journal:
    """The progress of one computation in a folder; without a folder nothing is kept.

    step: the first step that is not complete. strips: how many strips of its output are stored. totals: those of this
    step that are known. shapes: of the stored maps, by step. pool: the mean of the last map so far, and the number of
    its positions. logits: None until they are known.

    key: of network, image and settings.

    Raises ValueError if the folder has the progress of another computation.
    """

    def __init__(self, folder: Path | None = None, key: str = "") -> None:
        self.folder, self.key = folder, key
        self.step, self.strips = 0, 0
        self.shapes: dict[str, tuple[Size, torch.dtype]] = {}
        self.totals: list[Total] = []
        self.pool: Total | None = None
        self.logits: Tensor | None = None
        if folder is not None and (folder / PROGRESS).is_file():
            self._go_on(folder)

    def note(self, step: int, strips: int = 0) -> None:
        """Notes how far the computation is, and everything else that is known."""
        if step != self.step:
            self.totals = []
        self.step, self.strips = step, strips
        if self.folder is not None:
            content = {name: getattr(self, name) for name in NOTED}
            with replacing(self.folder / PROGRESS) as file:
                torch.save(content | {"totals": [tuple(total) for total in self.totals]}, file)

    def _go_on(self, folder: Path) -> None:
        before = read_checkpoint(folder / PROGRESS)
        if before.get("key") != self.key:
            raise ValueError(
                f"{folder} has the progress of another computation, whose network, image or settings differ: choose"
                " another folder as `spill`, or remove this one."
            )
        for name in NOTED:
            setattr(self, name, before[name])
        self.totals = [State(*total) if len(total) == len(State._fields) else total for total in self.totals]


def key_of(network: nn.Module, image: Image, settings: Any) -> str:
    """A digest of the weights, of settings, and of some rows of the image."""
    digest = hashlib.sha256(json.dumps([list(image.shape), settings]).encode())
    height = image.shape[2]
    rows = [image.read(start, start + 1) for start in range(0, height, -(-height // 16))]
    for tensor in (*network.state_dict().values(), *rows):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""What a streamed network has computed so far, so that it goes on after an interruption."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.files import read_checkpoint, replacing, write_json
from linvit.ops.state import State
from linvit.streaming.images import Image
from linvit.streaming.maps import Size
from linvit.streaming.strip import Total

PROGRESS, TOTALS, LOGITS = "progress.json", "totals.pt", "logits.pt"


class Journal:
    """The progress of one computation in a folder; without a folder nothing is kept.

    step: the first step that is not complete. strips: how many strips of its output are stored. totals: those of this
    step that are known. shapes: of the stored maps, by step.

    key: of network, image and settings.

    Raises ValueError if the folder has the progress of another computation.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder, self.key = folder, key
        self.step, self.strips = 0, 0
        self.totals: list[Total] = []
        self.shapes: dict[str, tuple[Size, torch.dtype]] = {}
        if folder is not None and (folder / PROGRESS).is_file():
            self._go_on(folder)

    def note(self, step: int, strips: int = 0) -> None:
        """Notes how far the computation is."""
        if step != self.step:
            self.totals = []
        self.step, self.strips = step, strips
        if self.folder is not None:
            shapes = {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
            content = {"key": self.key, "step": step, "strips": strips, "shapes": shapes}
            write_json(self.folder / PROGRESS, content)

    def note_totals(self, totals: Sequence[Total]) -> None:
        """Stores the known totals of the present step."""
        self.totals = list(totals)
        self.note(self.step)
        self._store(TOTALS, {"step": self.step, "totals": [tuple(total) for total in totals]})

    def note_logits(self, logits: Tensor) -> None:
        """Stores the logits."""
        self._store(LOGITS, {"logits": logits})

    def logits(self) -> Tensor | None:
        """The logits of an earlier call."""
        file = None if self.folder is None else self.folder / LOGITS
        return read_checkpoint(file)["logits"] if file is not None and file.is_file() else None

    def _store(self, name: str, content: dict[str, Any]) -> None:
        if self.folder is not None:
            with replacing(self.folder / name) as file:
                torch.save(content, file)

    def _go_on(self, folder: Path) -> None:
        before = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if before.get("key") != self.key:
            raise ValueError(
                f"{folder} has the progress of another computation, whose network, image or settings differ: choose"
                " another folder as `spill`, or remove this one."
            )
        self.step, self.strips = before["step"], before["strips"]
        self.shapes = {
            name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for name, (shape, dtype) in before["shapes"].items()
        }
        stored = read_checkpoint(folder / TOTALS) if (folder / TOTALS).is_file() else {}
        if stored.get("step") == self.step:
            self.totals = [State(*t) if len(t) == len(State._fields) else t for t in stored["totals"]]


def key_of(network: nn.Module, image: Image, settings: Any) -> str:
    """A digest of the weights, of settings, and of some rows of the image."""
    digest = hashlib.sha256(json.dumps([list(image.shape), settings]).encode())
    height = image.shape[2]
    rows = [image.read(start, start + 1) for start in range(0, height, -(-height // 16))]
    for tensor in (*network.state_dict().values(), *rows):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

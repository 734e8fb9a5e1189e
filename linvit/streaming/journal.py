"""What a streamed network has computed so far, so that it goes on after an interruption."""

import hashlib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.files import read_checkpoint, replacing
from linvit.ops.state import State
from linvit.streaming.images import Image
from linvit.streaming.networks import Plan
from linvit.streaming.strip import Size, Total, Written

PROGRESS = "progress.pt"
READ = 2**24  # values of the image at a time
DIGEST = "digest"
FILES = ("pretrained_cfg", "default_cfg")  # attributes that name files of weights
NOTED = ("key", "step", "strips", "shapes", "written", "totals", "pool", "logits")


class Journal:
    """The progress of one computation in a folder; without a folder nothing is kept.

    step: the first step that is not complete. strips: how many strips of its output are stored. totals: those of this
    step that are known. shapes, written: of the stored maps, by step. pool: the mean of the last map so far, and the
    number of its positions. logits: None until they are known.

    key: of network, image and settings.

    Raises ValueError if the folder has the progress of another computation, or it is damaged.
    """

    def __init__(self, folder: Path | None = None, key: str = "") -> None:
        self.folder, self.key = folder, key
        self.step, self.strips = 0, 0
        self.shapes: dict[str, tuple[Size, torch.dtype]] = {}
        self.written: dict[str, Written] = {}
        self.totals: list[Total] = []
        self.pool: Total | None = None
        self.logits: Tensor | None = None
        if folder is None or not (folder / PROGRESS).is_file():
            return
        before = read_checkpoint(folder / PROGRESS)
        if before.get("key") != key:
            raise SettingError(
                f"{folder} has the progress of another computation, whose network, image or settings differ: choose"
                " another folder as `spill`, or remove this one."
            )
        digest = before.pop(DIGEST, None)
        if digest_of(before) != digest or before.keys() != {*NOTED}:
            raise ValueError(f"{folder / PROGRESS} is damaged: remove the folder {folder} and compute again.")
        for name in NOTED:
            setattr(self, name, before[name])
        self.totals = [State(*total) if len(total) == len(State._fields) else total for total in self.totals]

    def note(self, step: int, strips: int = 0) -> None:
        """Notes how far the computation is, and everything else that is known."""
        if step != self.step:
            self.totals = []
        self.step, self.strips = step, strips
        if self.folder is not None:
            content = {name: getattr(self, name) for name in NOTED}
            content["totals"] = [tuple(total) for total in self.totals]
            with replacing(self.folder / PROGRESS) as file:
                torch.save({**content, DIGEST: digest_of(content)}, file)


def key_of(network: nn.Module, image: Image, plan: Plan, settings: Any) -> str:
    """A digest of weights and configuration of the network, of the plan, of settings and of the image.

    A file counts by its path, size, time of change and 16 rows; another image by all rows.
    """
    modules = [
        (name, type(module), {key: value for key, value in vars(module).items() if key[0] != "_" and key not in FILES})
        for name, module in network.named_modules()
    ]
    steps = [(step.name, step.inputs, step.scale, step.reach, step.whole) for step in plan.steps]
    height, row = image.shape[2], image.shape[0] * image.shape[1] * image.shape[3]
    starts = range(0, height, -(-height // 16) if image.file else max(READ // row, 1))
    rows = (image.read(start, start + 1 if image.file else min(start + starts.step, height)) for start in starts)
    tensors = chain(network.named_parameters(), network.named_buffers())
    return digest_of([modules, steps, plan.maps, plan.pooled, image.shape, image.file, settings, tensors, rows])


def digest_of(content: Any) -> str:
    """A digest of tensors and plain values in nested containers, the same in every process."""
    digest = hashlib.sha256()
    if isinstance(content, Tensor):
        digest.update(repr((content.shape, content.dtype)).encode())
        digest.update(content.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(content, dict | list | tuple | Iterator):
        for item in content.items() if isinstance(content, dict) else content:
            digest.update(digest_of(item).encode())
    else:  # functions have another address in each process
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(content)).encode())
    return digest.hexdigest()

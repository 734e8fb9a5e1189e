"""Runs a network strip by strip."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from linvit.arguments import check_network
from linvit.files import check_writable, user_path
from linvit.layers.patches import checked_image
from linvit.models.backbone import Backbone
from linvit.models.family import imagenet_cfg
from linvit.ranges import Range, check
from linvit.streaming.clock import Clock
from linvit.streaming.images import Image, open_image
from linvit.streaming.journal import Journal, key_of
from linvit.streaming.maps import RowMean, Size, StoredMap
from linvit.streaming.steps import Step, averages, steps_of
from linvit.streaming.strip import Pending, Rows, Strip, Total, attending, cut, together

GIB = 2**30
COPIES = 2.5  # how many maps as wide as each convolution are in memory at once, about
ARGUMENTS = {
    "rows": Annotated[int, Range(1)] | None,
    "memory": Annotated[float, Range(above=0)],
    "maps": bool,
}
Say = Callable[[str], object]


@dataclass
class Streamed:
    """What `stream` computed.

    logits: (batch, classes); None for a network without an average before its classifier. maps: the outputs of the
    stages by their stride, if asked for; `read(start, stop)` gives rows of one. seconds: time of the call. strips: how
    many strips were computed, in all passes.
    """

    logits: Tensor | None = None
    maps: dict[int, StoredMap] = field(default_factory=dict)
    seconds: float = 0.0
    strips: int = 0


def stream(
    network: nn.Module,
    image: Any,
    rows: int | None = None,
    spill: str | Path | None = None,
    memory: float = 1.0,
    maps: bool = False,
    progress: Say = lambda line: None,
) -> Streamed:
    """What a network computes from an image of any height, with only some rows of it in memory at a time.

    The result equals `network(image)` up to rounding. Time is linear in the pixels.

    Args:
        network: a RAVLT, MAViT or CARE in evaluation mode, with linear attention or strips in all stages.
        image: a float tensor (batch, channels, height, width) as the network reads it; an array of 8-bit pixels
            (height, width, channels); a path; or an object with `shape` (batch, channels, height, width) and
            `read(start, stop)`, which returns rows. Of a TIFF file only the rows of a strip are read at a time.
        rows: height of a strip in pixels; None for what fits the memory.
        spill: folder for the maps between layers and for the progress: the same call goes on after an interruption.
            None keeps maps that fit in memory, and others in a temporary folder.
        memory: GiB for the maps inside a strip; a map between layers that is larger goes to disk.
        maps: also keep the outputs of the stages; in `spill`, or without it in memory.
        progress: called with a line every few seconds.

    Raises:
        TypeError: for an image or a network of another type.
        ValueError: for a network that cannot be computed strip by strip, naming the layer; an argument out of range; an
            image that the network cannot read; and a spill folder of another computation.
        FileNotFoundError, ImportError: for a missing file, and a missing library that would read it.
        OSError: if the spill folder cannot be written or has no room.
    """
    check_network("network", network)
    check(ARGUMENTS, {"rows": rows, "memory": memory, "maps": maps})
    steps = steps_of(network)
    body = cast(Backbone, network)
    config: Mapping[str, Any] = getattr(network, "pretrained_cfg", None) or imagenet_cfg()
    first = next(network.parameters())
    opened = open_image(image, config, first.dtype)
    checked_image(torch.empty(opened.shape, device="meta", dtype=first.dtype), body.in_chans)
    began = time.monotonic()
    with _folder(spill) as folder:
        journal = Journal(None if spill is None else folder, key_of(network, opened, [rows, memory, maps]))
        run = _Run(body, steps, opened, folder, journal, rows, memory, maps, progress)
        streamed = run.result()
    streamed.seconds = time.monotonic() - began
    return streamed


class _Run:
    """One computation: the steps, one after the other."""

    def __init__(
        self,
        network: Backbone,
        steps: list[Step],
        image: Image,
        folder: Path,
        journal: Journal,
        rows: int | None,
        memory: float,
        maps: bool,
        progress: Say,
    ) -> None:
        self.network, self.steps, self.image, self.folder, self.journal = network, steps, image, folder, journal
        self.rows, self.memory, self.keeps = rows, memory * GIB, maps
        self.mean = RowMean() if averages(network) else None
        self.streamed = Streamed()
        self.clock = Clock(_work(steps), progress)

    @torch.inference_mode()
    def result(self) -> Streamed:
        before = self.journal.result()
        source: Any = self.image
        stride = 1
        for number, step in enumerate(self.steps):
            target = self._stored(number) if before else self._mapped(number, step, source, stride)
            stride *= step.stride
            if target is not None and self._is_kept(step):
                self.streamed.maps[stride] = target
            if isinstance(source, StoredMap) and source not in self.streamed.maps.values():
                source.remove()
            source = target
        if before:
            self.streamed.logits = before["logits"]
        elif self.mean is not None:
            self.streamed.logits = cast(Tensor, self.network.forward_head(self.mean.value()))
        self.journal.note_result(self.streamed.logits)
        return self.streamed

    def _is_kept(self, step: Step) -> bool:
        """Whether the output is part of the result."""
        return (self.keeps and step.stage is not None) or (self.mean is None and step is self.steps[-1])

    def _mapped(self, number: int, step: Step, source: Image | StoredMap, stride: int) -> StoredMap | None:
        """The output of a step; None if only its mean is needed, or if a later one is complete."""
        if number < self.journal.step:
            self.clock.skip(number)
            return self._stored(number)
        strips = cut(source.shape[2], self._height_of_strips(step, source.shape, stride), step.reach, step.stride)
        totals = list(self.journal.totals)
        while True:
            target, adds = self._pass(number, step, source, strips, totals)
            if adds is None:
                if step is not self.steps[-1]:
                    self.journal.note(number + 1)
                return target
            totals.append(adds)
            self.journal.note_totals(totals)

    def _pass(
        self, number: int, step: Step, source: Image | StoredMap, strips: list[Rows], totals: list[Total]
    ) -> tuple[StoredMap | None, Total | None]:
        """Computes all strips: their output, or what they add to the next total."""
        target, adds = None, None
        if self.journal.strips:
            target = self._stored(number)
        for index in range(self.journal.strips, len(strips)):
            rows = strips[index]
            x = source.read(rows.first, rows.last)
            try:
                with attending(step.module, Strip(rows, totals, whole=len(strips) == 1)):
                    y = step.forward(x, rows.first)
            except Pending as pending:
                adds = pending.adds if adds is None else together(adds, pending.adds)
            else:
                height = step.height(source.shape[2])
                start, place = rows.of_output(step.stride, height, end=rows.stop == source.shape[2])
                target = self._written(number, target, start, y[:, :, place], height)
            self.streamed.strips += 1
            self.clock.tick(number, step.name, 0.0 if adds else index / len(strips))
        return target, adds

    def _written(self, number: int, target: StoredMap | None, start: int, y: Tensor, height: int) -> StoredMap | None:
        """Stores rows of the output, or adds them to its mean."""
        last = number == len(self.steps) - 1
        if last and self.mean is not None:
            self.mean.write(start, y)
        if last and not self._is_kept(self.steps[number]):
            return None
        if target is None:
            target = self._new(number, (y.shape[0], y.shape[1], height, y.shape[3]), y.dtype)
        target.write(start, y)
        if not last:
            self.journal.note(number, self.journal.strips + 1)
        return target

    def _new(self, number: int, shape: Size, dtype: torch.dtype) -> StoredMap:
        """Room for the output of a step, on disk if it is to survive an interruption or does not fit."""
        fits = prod(shape) * dtype.itemsize <= self.memory or self._is_kept(self.steps[number])
        path = None if self.journal.folder is None and fits else self.folder / f"{number}.map"
        if path is not None:
            path.unlink(missing_ok=True)
        self.journal.shapes[str(number)] = (shape, dtype)
        return StoredMap(shape, dtype, path)

    def _stored(self, number: int) -> StoredMap | None:
        """The output of a step of an earlier call; None if it is no longer needed."""
        path = self.folder / f"{number}.map"
        return StoredMap(*self.journal.shapes[str(number)], path) if path.is_file() else None

    def _height_of_strips(self, step: Step, shape: Size, stride: int) -> int:
        """Rows of the step's input in one strip."""
        if self.rows is not None:
            return max(self.rows // stride, 1)
        first = next(self.network.parameters())
        row = COPIES * step.channels * shape[0] * shape[3] * first.element_size()
        return max(int(self.memory / row) - 2 * step.reach, step.stride)


def _work(steps: list[Step]) -> list[float]:
    """Products of the convolutions of each step, for each pixel of the image."""
    area, work = 1.0, []
    for step in steps:
        products = 0.0
        for layer in step.convolutions:
            area /= layer.stride[0] * layer.stride[1]
            products += area * layer.weight.numel()
        work.append(products)
    return work


@contextmanager
def _folder(spill: str | Path | None) -> Iterator[Path]:
    if spill is not None:
        check_writable(user_path(spill))
        yield user_path(spill)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)

"""Runs a network strip by strip."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from linvit.arguments import check_network
from linvit.errors import SettingError
from linvit.files import locked, remove_leftovers, user_path
from linvit.layers.patches import checked_image
from linvit.models.backbone import Backbone
from linvit.models.family import imagenet_cfg
from linvit.ranges import IsA, OneOf, Range, check
from linvit.streaming.images import Image, open_image
from linvit.streaming.journal import Journal, key_of
from linvit.streaming.networks import KEPT, Plan, plan
from linvit.streaming.steps import IMAGE, Query, Step
from linvit.streaming.strip import Pending, Rows, StoredMap, Strip, Total, attending, cut, together

INTERVAL = 5.0  # seconds between lines
GIB = 2**30
COPIES = 2.5  # how many maps as wide as each convolution are in memory at once, about
ARGUMENTS = {
    "rows": Annotated[int, Range(1)] | None,
    "memory": Annotated[float, Range(above=0)],
    "keep": Sequence[Annotated[str, OneOf(KEPT)]],
    "query": Annotated[Any, IsA(Query)] | None,
    "spill": str | Path | None,
    "progress": Callable,
}
Say = Callable[[str], object]


class Clock:
    """Says after each few seconds which step is computed and how long all others will take.

    work: of each step, in any unit. first: the number of the first step that is not complete yet. say: called with a
    line.
    """

    def __init__(self, work: Sequence[float], first: int, say: Say) -> None:
        self._work, self._first, self._say = work, first, say
        self._began = self._last = time.monotonic()

    def tick(self, number: int, name: str, share: float) -> None:
        """A share of a step is complete."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return
        self._last = now
        done = sum(self._work[self._first : number]) + share * self._work[number]
        left = (sum(self._work[self._first :]) - done) * (now - self._began) / max(done, 1e-9)
        words = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        self._say(f"{name} ({number + 1} of {len(self._work)} steps); about {words} left")


@dataclass
class Streamed:
    """What `run_in_strips` computed.

    logits: of a classifier, (batch, classes). maps: the other results, StoredMap (batch, channels, height, width), of
    which `read(start, stop)` gives rows: by their stride 4, 8, 16 and 32 the outputs of the stages, and "scores",
    "labels" and "query", see `run_in_strips`. strips: how many strips were computed, in all passes.
    """

    logits: Tensor | None
    maps: dict[int | str, StoredMap]
    strips: int


def run_in_strips(
    network: nn.Module,
    image: Any,
    rows: int | None = None,
    spill: str | Path | None = None,
    memory: float = 1.0,
    keep: Sequence[str] = (),
    query: Query | None = None,
    progress: Say = lambda line: None,
) -> Streamed:
    """What a network computes from an image of any height, with only some rows of it in memory at a time.

    The result equals that of `network(image)` up to rounding. Time is linear in the pixels.

    Args:
        network: a RAVLT, MAViT or CARE with linear attention or strips in all stages, or a DenseBackbone, SemanticFPN
            or UperNet with one; in evaluation mode.
        image: a float tensor (batch, channels, height, width) as the network reads it; an array of 8-bit pixels
            (height, width, channels); a path; or an object with `shape` (batch, channels, height, width) and
            `read(start, stop)`, which returns rows. Of a file only the rows of a strip are read at a time, if pyvips is
            installed (the extra `stream`).
        rows: height of a strip in pixels; None for what fits the memory.
        spill: folder for the maps between layers and for the progress: the same call resumes after an
            interruption. To compare the image with that of the earlier call, all rows of a tensor, an array or a reader
            are read once at the start. None keeps maps in memory if they fit, otherwise in a temporary folder.
        memory: GiB for the maps inside a strip; a map between layers that is larger goes to disk.
        keep: "maps", the outputs of the stages (a DenseBackbone's, with its norms, are always kept); "scores", the
            logits of each position of a classifier's last map, or of each pixel. A segmentor always gives "labels", the
            most probable class of each pixel, 8 bits if that is enough. Without `spill` they are in memory.
        query: a token and a block: "query" is the row of the block's score matrix, (batch, heads, height, width).
        progress: called with a line every few seconds.

    Raises:
        TypeError: for an image or a network of another type.
        ValueError: for a network that cannot be computed strip by strip, naming the layer, or is not on the CPU; an
            argument out of range; an image that the network cannot read; and a spill folder that is damaged, of another
            computation or in use. CorruptImageError, which is one, for a file that is not a readable image.
        FileNotFoundError: for a missing file.
        OSError: if the spill folder cannot be written or has no room.
    """
    check_network("network", network)
    given = {"rows": rows, "memory": memory, "keep": keep, "query": query, "spill": spill, "progress": progress}
    check(ARGUMENTS, given)
    if (places := {parameter.device.type for parameter in network.parameters()}) != {"cpu"}:
        raise SettingError(f"`network` is on {' and '.join(places) or 'no device'}, expected the CPU: `network.cpu()`.")
    body = next((module for module in network.modules() if isinstance(module, Backbone)), None)
    config: Mapping[str, Any] = getattr(body, "pretrained_cfg", None) or imagenet_cfg()
    opened = open_image(image, config, next(network.parameters()).dtype)
    if body is not None:
        checked_image(torch.empty(opened.shape, device="meta"), body.in_chans)
    planned = plan(network, opened.shape, keep, query)
    settings = [rows, memory, list(keep), None if query is None else asdict(query)]
    with _folder(spill) as folder:
        journal = Journal() if spill is None else Journal(folder, key_of(network, opened, planned, settings))
        return _Run(network, planned, opened, folder, journal, rows, memory * GIB, progress).result()


@dataclass
class _Run:
    """One computation: the steps, one after the other. memory: in bytes."""

    network: nn.Module
    plan: Plan
    image: Image
    folder: Path
    journal: Journal
    rows: int | None
    memory: float
    progress: Say

    def __post_init__(self) -> None:
        self.dtype, self.strides = next(self.network.parameters()).dtype, self.plan.strides()
        self.maps: dict[str, Any] = {IMAGE: self.image}
        self.last_use = {name: step.name for step in self.plan.steps for name in step.inputs}
        self.computed = 0
        work = [step.products / self.strides[step.inputs[0]] ** 2 for step in self.plan.steps]
        self.clock = Clock(work, self.journal.step, self.progress)

    @torch.inference_mode()
    def result(self) -> Streamed:
        for number, step in enumerate(self.plan.steps):
            if number < self.journal.step:
                if step.name in self.journal.shapes:
                    self.maps[step.name] = self._stored(step)
            else:
                self._compute(number, step)
            for name in step.inputs:
                if self.last_use[name] == step.name and name not in (IMAGE, *self.plan.maps.values()):
                    self.maps.pop(name).remove()
        maps = {key: self.maps[name] for key, name in self.plan.maps.items()}
        for stored in maps.values():
            stored.check()
        return Streamed(self.journal.logits, maps, self.computed)

    def _compute(self, number: int, step: Step) -> None:
        """Computes the output of a step, and the logits, if they follow from it."""
        strips = self._strips(step)
        while (adds := self._pass(number, step, strips)) is not None:
            self.journal.totals.append(adds)
            self.journal.note(number)
        if step.name == self.plan.pooled:
            assert isinstance(self.network, Backbone)
            mean, _ = cast(tuple[Tensor, Tensor], self.journal.pool)
            self.journal.logits = self.network.forward_head(mean.to(self.dtype)[:, :, None, None])
        self.journal.note(number + 1)

    def _pass(self, number: int, step: Step, strips: list[Rows]) -> Total | None:
        """Computes all strips: stores their output and returns None, or returns what they add to the next total."""
        adds = None
        first = self.journal.strips
        if first and step.name in self.journal.shapes:
            self.maps[step.name] = self._stored(step)
        for index in range(first, len(strips)):
            rows = strips[index]
            try:
                y = self._output(step, rows, whole=len(strips) == 1)
            except Pending as pending:
                adds = pending.adds if adds is None else together(adds, pending.adds)
            else:
                self._write(step, rows, y)
                self.journal.note(number, index + 1)
            self.computed += 1
            self.clock.tick(number, step.name, 0.0 if adds else index / len(strips))
        return adds

    def _output(self, step: Step, rows: Rows, whole: bool) -> Tensor:
        """The rows of the output that are computed, from those of the inputs that are read."""
        places = [rows.at(self.strides[name], self.maps[name].shape[2]) for name in step.inputs]
        maps = [self.maps[name].read(at.first, at.last) for name, at in zip(step.inputs, places, strict=True)]
        with attending(step.module, Strip(places[0], self.journal.totals, whole)):
            y = step.forward(maps)
        out = rows.at(self.strides[step.name], self._height(step))
        return y[:, :, out.computed]

    def _write(self, step: Step, rows: Rows, y: Tensor) -> None:
        """Stores rows of the output, or adds them to its mean."""
        height = self._height(step)
        start = rows.at(self.strides[step.name], height).start
        if step.name == self.plan.pooled:
            adds = y.double().mean((2, 3)), torch.full((len(y),), y[0, 0].numel(), dtype=torch.float64)
            self.journal.pool = adds if start == 0 else together(cast(Total, self.journal.pool), adds)
            if step.name not in self.last_use and step.name not in self.plan.maps.values():
                return
        if start == 0:  # the map is on disk if it is to survive an interruption or does not fit into memory
            shape = (y.shape[0], y.shape[1], height, y.shape[3])
            fits = prod(shape) * y.dtype.itemsize <= self.memory or step.name in self.plan.maps.values()
            path = None if self.journal.folder is None and fits else self._path(step)
            if path is not None and not path.is_dir():  # a folder is refused when the file is made
                path.unlink(missing_ok=True)
            self.journal.shapes[step.name] = (shape, y.dtype)
            self.maps[step.name] = StoredMap(shape, y.dtype, path)
        self.maps[step.name].write(start, y)
        self.journal.written[step.name] = self.maps[step.name].written

    def _stored(self, step: Step) -> StoredMap:
        """The output of a step of an earlier call, which may be removed already."""
        return StoredMap(*self.journal.shapes[step.name], self._path(step), self.journal.written[step.name])

    def _path(self, step: Step) -> Path:
        return self.folder / f"{step.name}.map"

    def _height(self, step: Step) -> int:
        return step.height(self.maps[step.inputs[0]].shape[2])

    def _strips(self, step: Step) -> list[Rows]:
        """The strips of a step, in rows of the image."""
        _, _, height, _ = self.maps[IMAGE].shape
        batch, _, _, width = self.maps[step.inputs[0]].shape
        stride = self.strides[step.inputs[0]]
        reach = step.rows_around * stride
        rows = self.rows
        if step.whole:
            rows = height
        elif rows is None:
            row = COPIES * step.channels * batch * width * self.dtype.itemsize
            rows = int(self.memory / max(row, 1)) * stride - 2 * reach
        unit = max(self.strides[name] for name in (*step.inputs, step.name))
        return cut(height, max(rows, 1), reach, unit)


@contextmanager
def _folder(spill: str | Path | None) -> Iterator[Path]:
    if spill is None:
        with TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        folder = user_path(spill)
        with locked(folder, f"Another process computes in {folder}: wait for it, or choose another folder as `spill`."):
            remove_leftovers(folder)
            yield folder

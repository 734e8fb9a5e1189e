"""What the file of a deployed network says about itself."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from linvit.data.images.augmented import INTERPOLATIONS
from linvit.data.images.image import Deviation
from linvit.files import explained
from linvit.ranges import Amount, Count, OneOf, Range, check, declared

BACKBONE = "backbone"
DETECTIONS = ("boxes", "scores", "labels", "masks")
"""The outputs of files that choose the detections themselves; other detectors leave this to the reader of the file."""

KEY = "linvit"
"""The name of the entry in a file's own metadata that has all facts, as JSON."""


class FactsError(ValueError):
    """A file does not say what it contains, or contains what linvit does not open."""


@dataclass(frozen=True)
class Facts:
    """What is needed to use a file without the program that wrote it.

    name: of the network. task: of its run; BACKBONE for a network that returns maps. class_names: of the outputs. size:
    height and width in pixels that it was made for. smallest: side in pixels from which other sizes and batches work
    too; 0 if none do. mean, std: per channel in 0..1; the file applies them, its input is uint8 pixels. interpolation,
    crop_pct: how images are resized and cropped before. weights: SHA-256 of the network's weights. outputs: names of
    the outputs, in order; DETECTIONS for a detector that chooses its detections. strides: pixels between neighbouring
    positions of each output map, or of each level of a detector; otherwise empty. fit: the long and the short side in
    pixels that images are scaled to fit, without a crop; None if they are cropped. stored: what else the run knew about
    its data, such as the category ids of a detector. calibrated: number of images that the 8-bit layers were calibrated
    on; 0 for a file in float32.
    """

    name: str
    task: str
    class_names: tuple[str, ...]
    size: tuple[Count, Count]
    smallest: Amount
    mean: tuple[float, ...]
    std: tuple[Deviation, ...]
    interpolation: Annotated[str, OneOf(INTERPOLATIONS)]
    crop_pct: Annotated[float, Range(above=0, most=1)]
    weights: str
    outputs: tuple[str, ...] = ("outputs",)
    strides: tuple[Count, ...] = ()
    fit: tuple[Count, Count] | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    calibrated: Amount = 0
    inputs: ClassVar[tuple[str, ...]] = ("images",)

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def dynamic(self) -> bool:
        """Whether the file reads any batch, height and width."""
        return self.smallest > 0

    def check(self, shape: Sequence[int], path: Any) -> None:
        """Raises ValueError for images (batch, channels, height, width) that the file cannot read."""
        channels, *size = shape[1:]
        fits = min(size) >= self.smallest if self.dynamic else tuple(size) == self.size
        if channels != self.channels or not fits:
            sides = f"sides of at least {self.smallest} px" if self.dynamic else f"{self.size[0]}×{self.size[1]} px"
            raise ValueError(
                f"The images have {channels} channels and {size[0]}×{size[1]} px, but {path} reads {self.channels} and"
                f" {sides}: resize them, or export again for their size."
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class SequenceFacts:
    """The same for a decoder of tokens or a Conformer.

    name, task, weights, class_names: as in Facts. mechanism: of the attention. logits: number of logits per position.
    dynamic: whether the file reads any batch and any number of tokens or frames; otherwise one token of one sequence.
    states: of decoders, the name and shape of every state for one sequence before its first token, where all are zeros;
    a size of 0 grows by one per token. preprocessing: how the inputs are made, such as tokenizer and separator, or
    sampling rate, mel bands, their mean and standard deviation; empty for a network without a run.
    """

    name: str
    task: str
    weights: str
    mechanism: str
    logits: Count
    dynamic: bool
    states: dict[str, list[Amount]]
    class_names: tuple[str, ...] = ()
    preprocessing: dict[str, Any] = field(default_factory=dict)
    calibrated: ClassVar[int] = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the file's inputs, in order."""
        return (SEQUENCES[self.task], *self.states)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the file's outputs, in order."""
        return ("logits", *(f"next.{name}" for name in self.states))

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


SEQUENCES: Mapping[str, str] = {"language": "tokens", "speech": "features"}
"""The tasks of SequenceFacts, and the inputs of their networks."""


def facts_in(text: str | None, path: Any) -> Facts | SequenceFacts:
    """The facts in JSON; raises FactsError, naming the file, if they are missing or damaged."""
    if text is None:
        raise FactsError(f"{path} was not written by `linvit export`: it does not say what it reads and returns.")
    with explained(
        lambda reason: f"What {path} says about itself is damaged ({reason}): export it again.",
        (ValueError, KeyError, TypeError),
        FactsError,
    ):
        values = json.loads(text)
        kind: Any = SequenceFacts if values["task"] in SEQUENCES else Facts
        values = {name: values[name] for name in declared(kind)}
        check(kind, values)
        facts: Facts | SequenceFacts = kind(
            **{key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
        )
    return facts


def digest(network: nn.Module) -> str:
    """SHA-256 of the names and values of all weights and buffers."""
    whole = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        whole.update(name.encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()

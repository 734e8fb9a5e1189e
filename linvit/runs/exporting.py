"""Networks written to files of other runtimes."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, cast

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_data_config
from timm.layers import PatchEmbed
from timm.models import FeatureInfo
from torch import Tensor, nn

from linvit.analysis.scores import evenly
from linvit.arguments import check_network, kind
from linvit.data.images.image import SMALLEST, CorruptImageError, Preprocessing, Side
from linvit.data.speech.audio import FLOOR, HOP, WINDOW
from linvit.data.text.source import TextPreprocessing
from linvit.data.text.tokens import BYTES, open_tokenizer
from linvit.deploy import Exported, write, write_sequence
from linvit.deploy.facts import BACKBONE, DETECTIONS, SEQUENCES, Facts, SequenceFacts, digest
from linvit.deploy.formats import format_of
from linvit.deploy.int8 import need_int8
from linvit.deploy.sequences import conformer_example, decoder_example, in_pieces, state_shapes, unfuse
from linvit.errors import SettingError, refuse
from linvit.files import user_path
from linvit.models.conformer import Conformer
from linvit.models.dense.anchors import Anchors
from linvit.models.dense.backbone import STRIDES, DenseBackbone
from linvit.models.dense.mask_rcnn import RegionDetector
from linvit.models.dense.retinanet import RetinaNet
from linvit.models.sequence import Decoder
from linvit.ranges import Range, check, check_names
from linvit.runs.exported import ExportedConformer, ExportedDecoder, ExportedNetwork
from linvit.runs.images import find_images, photos, read_image
from linvit.runs.trained import Trained, classifier_parts
from linvit.tasks.classification import Classification, MultiLabel
from linvit.tasks.detection import Detection
from linvit.tasks.segmentation import Segmentation
from linvit.tasks.task import Task

EXPORTED: dict[type[Task], str] = {
    Classification: "classification",
    MultiLabel: "multilabel",
    Segmentation: "segmentation",
    Detection: "detection",
}
"""The tasks on images whose networks can be exported, and their names in the files."""
SCALES = (1.25, 0.75, 1.5)  # of further sizes to compare at, of which the first two are used that the file reads
REGION_SUFFIXES = (".onnx", ".xml")  # of files of region detectors: the others have no non-maximum suppression
SEQUENCE_SUFFIXES = (".onnx", ".xml", ".pt2")
MOST = 16  # images to compare on
AT_ONCE = 2  # of them, because maps of logits are large
FEWEST_TO_CALIBRATE, MOST_TO_CALIBRATE = 16, 256
COMPARED = ((1, 99), (2, 24))  # sequences and tokens of the comparisons
LONGEST = max(batch * length for batch, length in COMPARED)
TEXT = "A file is read in its runtime as its users read it: many tokens at once, then a few, then one after the other. "
FRAMES = ((1, 5), (1, 301), (2, 75))  # utterances and frames

logger = logging.getLogger(__name__)


class ExportOptions(TypedDict, total=False):
    """How a file is written; of these, decoders and Conformers have `dynamic` and `opset` alone.

    size: height and width in pixels (default: that of the run's preprocessing; of detectors and segmentors, their short
    side). dynamic: whether the file reads any batch, height and width, or any number of tokens; otherwise one image of
    that size, or one token of one sequence (default: yes, but not for .pte and .mlpackage, and for .pt2 of images only
    from 64 px; never for Mask R-CNN and its cascade, nor for networks that refuse other sizes, as most of timm's ViTs
    do). images: image files, folders, PIL images or arrays to compare on (default: two photos, with `int8` some of
    `calibrate`); a Mask R-CNN must detect something in them. compiled: whether a .pt2 file has machine code for
    processors like this one, made by torch's AOTInductor with a C++ compiler; torch opens it, linvit does not. opset:
    opset version of an .onnx file, for older runtimes (default: torch's choice, 20 in PyTorch 2.15). int8: whether
    convolutions and products with weights are computed in 8 bits; only .onnx, .xml and .pte. calibrate: with `int8`,
    image files, folders, PIL images or arrays from which the ranges of activations are taken, 16 or more; of more than
    256, as many are evenly chosen. report: with `int8`, a folder for the sensitivity of every layer to 8 bits: a table
    (CSV) and a figure.
    """

    size: Side | tuple[Side, Side] | None
    dynamic: bool | None
    images: Sequence[Any] | None
    compiled: bool
    opset: Annotated[int, Range(18, 23)] | None
    int8: bool
    calibrate: Sequence[Any] | None
    report: str | Path | None


def export(source: Trained | nn.Module, path: str | Path, **options: Unpack[ExportOptions]) -> Exported:
    """Writes a network to a file of another runtime, runs it there and compares it with the network in float32.

    Core ML runs on macOS alone: on other systems, such a file is written and read again, but not run.

    The file reads uint8 images (batch, channels, height, width), RGB or grey, and normalizes them itself. It returns,
    in float32: of classifiers logits (batch, classes); of segmentors logits (batch, classes, height, width); of a
    RetinaNet boxes (batch, anchors, 4) and scores (batch, anchors, classes) before non-maximum suppression; of
    backbones their maps (batch, channels, height, width). It contains class names, sizes and preprocessing as JSON.

    The file of a Mask R-CNN or Cascade Mask R-CNN reads one image of one size and returns its detections, chosen by
    non-maximum suppression, best first: boxes (n, 4) in pixels, scores (n,), int64 labels (n,) and mask probabilities
    (n, 28, 28) within the boxes, with n of 0 to 100. It can be .onnx and .xml. It is kept if 99 % of the detections are
    those of the network, to 1e-4 in scores and in boxes (as a share of the largest coordinate), and to 1e-3 in masks.

    The file of a decoder reads int64 tokens (batch, tokens) and the float32 states after the tokens before, zeros at
    the start; it returns logits (batch, tokens, vocabulary) and the states after these tokens. That of a Conformer with
    head "ctc" reads float32 features (batch, frames, mels) without padding and returns logits (batch, frames / 4
    rounded up, tokens). Both can be .onnx, .xml and .pt2. They are compared on bytes of English text, read in pieces
    and token by token, and on random features.

    Args:
        source: a timm classifier, a backbone (a timm model with `features_only=True` or a DenseBackbone), a Decoder, or
            a Conformer; a run has the method `export`.
        path: .onnx, .xml (OpenVINO, with the weights next to it as .bin), .pt2 (torch.export), .pte (ExecuTorch) or
            .mlpackage (Core ML, a folder).
        options: size, dynamic, images, compiled, opset, int8, calibrate and report, see ExportOptions.

    Returns:
        The file's path and the largest difference; None if the runtime does not run on this system.

    Raises:
        ImportError: if the runtime is missing (the message names the extra of linvit that installs it), or the C++
            compiler.
        ValueError: for options that do not fit together, a network that cannot be exported, no readable image, images
            in which a Mask R-CNN detects nothing, and a file whose outputs differ from the network's; nothing is left
            behind then.
    """
    check_names("option of export", options, ExportOptions.__annotations__)
    check(ExportOptions.__annotations__, options)
    network, path = source.network if isinstance(source, Trained) else source, user_path(path)
    if isinstance(network, ExportedNetwork | ExportedDecoder | ExportedConformer):
        raise ValueError(f"{network.path} is an exported file: export the run that it was made from.")
    if isinstance(network, Decoder | Conformer):
        return _export_sequence(source, network, path, options)
    return _export_images(source, path, options)


def _export_images(source: Trained | nn.Module, path: Path, options: Mapping[str, Any]) -> Exported:
    """Writes a network on images."""
    calibrate, report, dynamic = (options.get(name) for name in ("calibrate", "report", "dynamic"))
    int8 = options.get("int8", False)
    refuse(
        int8 and calibrate is None and "`int8` needs images to calibrate on: set `calibrate` to a folder of them.",
        *(
            not int8
            and options.get(name) is not None
            and f"`{name}` is for files in 8 bits: set `int8` too, or leave `{name}` out."
            for name in ("calibrate", "report")
        ),
    )
    if isinstance(source, Trained) and isinstance(source.network, RegionDetector):
        refuse(
            path.suffix not in REGION_SUFFIXES
            and f"{source.name} cannot be exported to {path.suffix}, expected {' or '.join(REGION_SUFFIXES)}: change"
            " the suffix.",
            *(
                bool(options.get(name))
                and f"The file of {source.name} reads one image of one size in float32: leave `{name}` out."
                for name in ("dynamic", "int8")
            ),
        )
        dynamic = False
    network, facts = of_run(source) if isinstance(source, Trained) else _of_network(source)
    format = format_of(path, options.get("compiled", False), options.get("opset"))

    smallest = format.smallest
    if facts.task == "detection" and smallest > SMALLEST:
        smallest *= 2  # a RetinaNet has maps at twice the stride
    size = options.get("size") or facts.size
    height, width = (size, size) if isinstance(size, int) else size
    able = 0 < smallest <= min(height, width)
    if dynamic and not able:
        least = f", expected at least {smallest} px" if smallest else ""
        raise SettingError(
            f"`size` is {height}×{width}{least}: {path.suffix} files read one size only here; leave `dynamic` out."
        )
    patches = next((module for module in network.modules() if isinstance(module, PatchEmbed)), None)
    if dynamic is None:
        dynamic = able and (patches is None or not patches.strict_img_size)
    facts = replace(facts, size=(height, width), smallest=smallest if dynamic else 0)

    steps = (1, 1) if patches is None else patches.patch_size
    network = network.eval().cpu().float()
    images = options.get("images")
    if calibrate is None:
        return write(network, path, format, facts, _compared_on(images, facts, steps))
    need_int8(path.suffix)
    calibration = calibration_images(calibrate, facts)
    facts = replace(facts, calibrated=len(calibration))
    folder = None if report is None else user_path(report)
    return write(network, path, format, facts, _compared_on(images or calibrate, facts, steps), calibration, folder)


def of_run(run: Trained) -> tuple[nn.Module, Facts]:
    """What is written of a copy of a run's network on images, and the facts about it for files of one size."""
    if type(run.task) not in EXPORTED:
        *first, last = (*EXPORTED.values(), *SEQUENCES)
        task = type(run.task).__name__.lower()
        raise ValueError(f"{run.name} is a run of the task {task}, expected {', '.join(first)} or {last}: give one.")
    network, preprocessing = deepcopy(run.network), run.preprocessing
    facts = _facts(run.name, EXPORTED[type(run.task)], network, preprocessing.mean, preprocessing.std)
    facts = replace(facts, class_names=tuple(run.class_names), stored=run.stored)
    if isinstance(preprocessing, Preprocessing):
        return network, replace(
            facts, size=preprocessing.size, interpolation=preprocessing.interpolation, crop_pct=preprocessing.crop_pct
        )
    facts = replace(
        facts, size=(preprocessing.short_side,) * 2, fit=(preprocessing.long_side, preprocessing.short_side)
    )
    if isinstance(run.task, Segmentation):
        return network, replace(facts, strides=(1,))
    if isinstance(network, RegionDetector):
        return Detected(network), replace(facts, outputs=DETECTIONS)
    assert isinstance(network, RetinaNet)
    strides = cast(Anchors, network.anchor_generator).strides
    return Detected(network), replace(facts, outputs=("boxes", "scores"), strides=strides)


def _of_network(network: nn.Module) -> tuple[nn.Module, Facts]:
    """What is written of a copy of a backbone or timm classifier, and the facts about it for files of one size."""
    check_network("source", network)
    network = deepcopy(network)
    if isinstance(network, DenseBackbone):
        body, strides = network.body, list(STRIDES)
    elif isinstance(getattr(network, "feature_info", None), FeatureInfo):
        body, strides = network, cast(FeatureInfo, network.feature_info).reduction()
    elif hasattr(network, "pretrained_cfg") and hasattr(network, "num_classes"):
        return of_run(Trained(*classifier_parts(network), None, _name(network)))
    else:
        raise SettingError(
            f"`source` is {kind(network)}, expected a run, a classifier of timm, a backbone (a timm model with"
            " `features_only=True`, or a DenseBackbone), a Decoder or a Conformer: give one."
        )
    config = resolve_data_config(model=body)
    facts = _facts(_name(body), BACKBONE, network, config["mean"], config["std"])
    names = [f"stride{stride}" for stride in strides]
    if len(set(names)) < len(names):  # the maps of a ViT have one stride
        names = [f"{name}_{number}" for number, name in enumerate(names, start=1)]
    facts = replace(facts, size=tuple(config["input_size"][1:]), outputs=tuple(names), strides=tuple(strides))
    return Maps(network), facts


def _facts(name: str, task: str, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> Facts:
    weights = digest(network)
    return Facts(name, task, (), (0, 0), 0, tuple(mean), tuple(std), "bilinear", 1.0, weights)


def _name(network: nn.Module) -> str:
    """timm's name of the architecture, or that of the class."""
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or type(network).__name__)


class Maps(nn.Module):
    """The maps of a backbone, each (batch, channels, height, width)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps: list[Tensor] = self.network(images)
        last = getattr(self.network, "output_fmt", None) == "NHWC"
        return tuple(map_.permute(0, 3, 1, 2) if last else map_ for map_ in maps)


class Detected(nn.Module):
    """The candidates of a RetinaNet, from which detections are chosen later, or the detections of a Mask R-CNN."""

    def __init__(self, network: RetinaNet | RegionDetector) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.network, RetinaNet):
            return self.network.candidates(images)
        return self.network.detections(images)


def _compared_on(images: Sequence[Any] | None, facts: Facts, steps: tuple[int, int]) -> list[Tensor]:
    """Real images as uint8 batches (images, channels, height, width), of three sizes if the file reads any.

    steps: heights and widths other than those of the facts are multiples of them.
    """
    opened = photos(facts.channels) if images is None else _opened(images, MOST, facts.channels)
    batches: list[Tensor] = []
    sides = list(zip(facts.size, steps, strict=True))
    scaled = [[step * round(side * scale / step) for side, step in sides] for scale in SCALES]
    fitting = [facts.size, *(size for size in scaled if min(size) >= facts.smallest)]
    for height, width in fitting[: 3 if facts.dynamic else 1]:
        batches += _resized(opened, height, width).split(AT_ONCE if facts.dynamic else 1)
    return batches


def calibration_images(calibrate: Sequence[Any], facts: Facts) -> Tensor:
    """Images to calibrate on as uint8 (images, channels, height, width)."""
    opened = _opened(calibrate, MOST_TO_CALIBRATE, facts.channels)
    if len(opened) < FEWEST_TO_CALIBRATE:
        raise SettingError(
            f"`calibrate` has {len(opened)} readable images, expected {FEWEST_TO_CALIBRATE} or more: give more images."
        )
    return _resized(opened, *facts.size)


def _opened(images: Sequence[Any], most: int, channels: int) -> list[Image.Image]:
    """All images, or so many evenly chosen ones, without those that cannot be read."""
    items, _ = find_images(images)
    opened, unreadable = [], []
    for name, item in [items[index] for index in evenly(len(items), most).tolist()]:
        try:
            opened.append(read_image(item, name, channels))
        except CorruptImageError as error:
            unreadable.append(error)
    if not opened:
        raise unreadable[0]
    if unreadable:
        logger.warning("%d images cannot be read and are left out. The first: %s", len(unreadable), unreadable[0])
    return opened


def _resized(images: Sequence[Image.Image], height: int, width: int) -> Tensor:
    resized = [image.resize((width, height), Image.Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in resized]))
    return pixels[:, None] if pixels.ndim == 3 else pixels.movedim(-1, 1).contiguous()


def _export_sequence(
    source: Trained | nn.Module, network: Decoder | Conformer, path: Path, options: Mapping[str, Any]
) -> Exported:
    """Writes a decoder or Conformer."""
    unwanted = next((name for name, value in options.items() if value and name not in ("dynamic", "opset")), None)
    dynamic = options.get("dynamic")
    format = format_of(path, opset=options.get("opset"))
    refuse(
        unwanted is not None and f"`{unwanted}` is for networks of images, and this one reads sequences: leave it out.",
        path.suffix not in SEQUENCE_SUFFIXES
        and f"{format.name} files of decoders and Conformers cannot be written: choose one of"
        f" {', '.join(SEQUENCE_SUFFIXES)}.",
    )
    network = deepcopy(network).eval().cpu().float()
    unfuse(network)
    name = source.name if isinstance(source, Trained) else type(network).__name__
    about = {"name": name, "weights": digest(network), "mechanism": network.mechanism}
    if isinstance(network, Decoder):
        facts, tokens = _of_decoder(network, source, dynamic is not False, about)
        shapes = COMPARED if facts.dynamic else COMPARED[:1]
        batches = [tokens[: batch * length].view(batch, length) for batch, length in shapes]
        example, whole = decoder_example(network, facts), in_pieces(facts)
        return write_sequence(lambda batch: (network(batch),), path, format, facts, example, batches, whole)
    facts = _of_conformer(network, source, dynamic, about)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(batch, frames, network.mels, generator=generator) for batch, frames in FRAMES]
    example = conformer_example(network)
    return write_sequence(example[0], path, format, facts, example, batches, lambda session: session)


def _of_decoder(
    network: Decoder, source: Trained | nn.Module, dynamic: bool, about: Mapping[str, Any]
) -> tuple[SequenceFacts, Tensor]:
    """The facts about a decoder, and LONGEST tokens of an English text to compare on."""
    states = state_shapes(network)
    if not dynamic and any(0 in shape for shape in states.values()):
        raise SettingError(
            f"The cache of {network.mechanism} attention grows with every token, so a file cannot read one token of a"
            " fixed size: leave `dynamic` out, or use a linear mechanism."
        )
    preprocessing, tokenizer = {}, open_tokenizer(BYTES)
    if isinstance(source, Trained) and isinstance(source.preprocessing, TextPreprocessing):
        tokenizer = source.preprocessing.open()
        preprocessing = {**asdict(source.preprocessing), "separator_token": tokenizer.separator}
    tokens = torch.tensor(tokenizer.encode(TEXT.encode())).repeat(8)[:LONGEST] % network.vocabulary
    facts: dict[str, Any] = {"task": "language", "logits": network.vocabulary, "dynamic": dynamic, "states": states}
    return SequenceFacts(**about, **facts, preprocessing=preprocessing), tokens


def _of_conformer(
    network: Conformer, source: Trained | nn.Module, dynamic: bool | None, about: Mapping[str, Any]
) -> SequenceFacts:
    refuse(
        network.transduces
        and "A Conformer with a transducer cannot be exported, because its outputs depend on the text so far: train one"
        " with `head=ctc`.",
        dynamic is False and "A file of a Conformer reads any number of frames: leave `dynamic=False` out.",
    )
    preprocessing: dict[str, Any] = {"mels": network.mels, "window": WINDOW, "hop": HOP, "floor": FLOOR}
    names: tuple[str, ...] = ()
    if isinstance(source, Trained):
        preprocessing |= asdict(source.preprocessing)
        names = tuple(source.class_names)
    facts: dict[str, Any] = {
        "task": "speech",
        "logits": network.tokens,
        "dynamic": True,
        "states": {},
        "class_names": names,
    }
    return SequenceFacts(**about, **facts, preprocessing=preprocessing)

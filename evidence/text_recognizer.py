"""The recognizer of text lines of PP-OCRv4 (mobile) as a torch network, with the weights of its ONNX file.

The file is in the package rapidocr-onnxruntime (Apache-2.0), which is not a part of linvit. A convolutional network
reduces a line of 48 × W pixels to W / 8 tokens; two transformer blocks mix these; every token gets one of 6,625
classes. Their attention is softmax attention, or one of linvit's in a copy.
"""

import copy
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timm.layers import SqueezeExcite
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import linear_attention

HEIGHT, STRIDE = 48, 8
"""Pixels of a line, and those of its width for each token."""
WIDTH, HEADS, CLASSES = 120, 8, 6625
BLANK = 0
PAIRS = (
    (32, 3, (1, 1), 0),
    (64, 3, (1, 1), 0),
    (64, 3, (1, 1), 0),
    (128, 3, (2, 1), 0),
    (128, 3, (1, 1), 0),
    (240, 3, (1, 2), 0),
    *[(240, 5, (1, 1), 0)] * 4,
    (480, 5, (2, 1), 60),
    (480, 5, (1, 1), 120),
    (480, 5, (2, 1), 0),
    (480, 5, (1, 1), 0),
)
"""Each pair of a depthwise and a 1×1 convolution: channels, kernel, stride, channels of the squeeze-excitation or 0."""


class Affine(nn.Module):
    """One scale and one shift for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


def activated(inputs: int, outputs: int, kernel: int, stride: tuple[int, int], groups: int = 1) -> nn.Sequential:
    """A convolution and hard swish, each with a scale and a shift."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups)
    return nn.Sequential(convolution, Affine(), nn.Hardswish(), Affine())


def pair(inputs: int, outputs: int, kernel: int, stride: tuple[int, int], squeezed: int) -> nn.Sequential:
    """A depthwise convolution, squeeze-excitation if any, and a 1×1 convolution."""
    squeeze = [SqueezeExcite(inputs, rd_channels=squeezed, gate_layer=nn.Hardsigmoid)] if squeezed else []
    depthwise = activated(inputs, inputs, kernel, stride, groups=inputs)
    return nn.Sequential(depthwise, *squeeze, activated(inputs, outputs, 1, (1, 1)))


def normed(inputs: int, outputs: int, length: int = 1) -> nn.Sequential:
    """A convolution over `length` tokens, batch norm and swish."""
    convolution = nn.Conv2d(inputs, outputs, (1, length), padding=(0, length // 2), bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.SiLU())


class Attention(nn.Module):
    """Attention of all tokens to all tokens of a line, (batch, tokens, WIDTH) to the same shape.

    mechanism: "softmax", or one of LINEAR_AXES. local: tokens that a depthwise convolution of the values spans, which
    is added to what is read and starts as 0; 0 for none.
    """

    def __init__(self, mechanism: str = "softmax", local: int = 0) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.local = nn.Conv1d(WIDTH, WIDTH, local, padding=local // 2, groups=WIDTH) if local else None
        for parameter in () if self.local is None else self.local.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.mechanism == "softmax":
            y = scaled_dot_product_attention(query, key, value)
        else:
            y = linear_attention(query, key, value, **LINEAR_AXES[self.mechanism], backend="torch")
        if self.local is not None:
            channels = value.mT.flatten(1, 2)
            y = y + self.local(channels).unflatten(1, (HEADS, -1)).mT
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block: norms come first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH, eps=1e-5), Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    """What follows the convolutional network: features (batch, 480, 1, tokens) to logits (batch, tokens, classes)."""

    def __init__(self) -> None:
        super().__init__()
        features = PAIRS[-1][0]
        self.reduce = nn.Sequential(normed(features, features // 8, 3), normed(features // 8, WIDTH))
        self.blocks: Any = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.expand = normed(WIDTH, features)
        self.join = nn.Sequential(normed(2 * features, features // 8, 3), normed(features // 8, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.states(x))
        return out

    def states(self, x: Tensor) -> Tensor:
        """What the classifier reads, (batch, tokens, WIDTH)."""
        tokens = self.norm(self.blocks(self.tokens(x)))
        out: Tensor = self.join(torch.cat([x, self.expand(tokens.mT.unsqueeze(2))], dim=1))
        return out.squeeze(2).mT

    def tokens(self, x: Tensor) -> Tensor:
        """What the first block reads, (batch, tokens, WIDTH)."""
        out: Tensor = self.reduce(x)
        return out.squeeze(2).mT


class Recognizer(nn.Module):
    """Images (batch, 3, 48, W), W divisible by 8, with values in [-1, 1], to logits (batch, W / 8, classes)."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16))
        channels = pairwise([16, *(outputs for outputs, *_ in PAIRS)])
        pairs = [pair(inputs, *given) for (inputs, _), given in zip(channels, PAIRS, strict=True)]
        self.features = nn.Sequential(stem, *pairs, nn.AvgPool2d((3, 2)))
        self.reader = Reader()

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.reader(self.features(images))
        return out


def load_recognizer(path: Path) -> tuple[Recognizer, list[str]]:
    """The network in `path`, in eval mode, and its characters: that of class i is at i, an empty one for the blank.

    Raises ValueError for an ONNX file of another network.
    """
    import onnx

    model = onnx.load(path)
    network = Recognizer().eval()
    filled = {name: x for name, x in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    weights = weights_of(model.graph)
    shapes = [tuple((x.mT if x.ndim == 2 else x).shape) for x in weights]
    if shapes != [tuple(x.shape) for x in filled.values()]:
        raise ValueError(f"{path} is not the recognizer: give ch_PP-OCRv4_rec_infer.onnx of rapidocr-onnxruntime.")
    for x, given in zip(filled.values(), weights, strict=True):
        x.copy_(given.mT if given.ndim == 2 else given)
    characters = {entry.key: entry.value for entry in model.metadata_props}["character"].splitlines()
    return network, ["", *characters, " "]


def weights_of(graph: Any) -> list[Tensor]:
    """The weights in an ONNX graph in the order in which its nodes read them, which is that of our layers."""
    from onnx import numpy_helper

    weights = {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and re.search(r"\.[bw]_\d$", node.output[0])
    }
    read = [name for node in graph.node for name in node.input if name in weights]
    return [torch.from_numpy(numpy_helper.to_array(weights[name]).copy()) for name in read]


def linearized(reader: Reader, mechanism: str, pattern: str = "LL", local: int = 0) -> Reader:
    """A copy with linear attention in the blocks with an L, which starts with the projections of softmax attention."""
    student = copy.deepcopy(reader)
    for block, letter in zip(student.blocks, pattern, strict=True):
        if letter == "L":
            attention = Attention(mechanism, local)
            attention.load_state_dict(block.attn.state_dict(), strict=False)
            block.attn = attention
    return student


def decode(classes: Tensor, characters: list[str]) -> list[str]:
    """Greedy decoding: of (lines, tokens) the best classes, repetitions once, without blanks."""
    return ["".join(characters[i] for i in line.unique_consecutive().tolist() if i != BLANK) for line in classes]

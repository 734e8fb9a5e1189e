"""CARE's token mixer and its dual interaction (arXiv 2411.16170)."""

from collections.abc import Sequence
from typing import Unpack

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.attention import tokens_of_map
from linvit.layers.checks import TensorOptions
from linvit.layers.convolutions import DepthwiseConv, PointwiseConv, channels_of, convolved, depthwise_on_gpu
from linvit.layers.operator import AttentionLayer
from linvit.ranges import lookup

STRIPS = "strips"
LOCAL_SIZES = (3, 7)
SHARES = {"asymmetric": 3, "symmetric": 2, "stacked": 1, "attended": 1}  # attention gets one in this many channels


class Strips(nn.Module):
    """Depthwise 11×1 plus 1×11 convolutions: a cheap substitute for attention on large maps."""

    def __init__(self, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.vertical = DepthwiseConv(width, (11, 1), **dd)
        self.horizontal = DepthwiseConv(width, (1, 11), **dd)

    def forward(self, x: Tensor) -> Tensor:
        out = depthwise_on_gpu(x, [[self.vertical, self.horizontal]])
        return self.vertical(x) + self.horizontal(x) if out is None else out


def mixed(x: Tensor, widths: Sequence[int], attended: nn.Module, local: Sequence[DepthwiseConv]) -> list[Tensor]:
    """x with one group of channels attended to, or convolved by strips, and a local convolution of each other group.

    The results of one or several groups, in the order of their channels.
    """
    groups = [[conv] for conv in local]
    strips = [[attended.vertical, attended.horizontal]] if isinstance(attended, Strips) else []
    if strips:
        out = depthwise_on_gpu(x, strips + groups)
        if out is not None:
            return [out]
    convolved = depthwise_on_gpu(channels_of(x, widths[0]), groups) if groups else None
    if convolved is not None:
        return [attended(channels_of(x, 0, widths[0])), convolved]
    parts = x.split(list(widths), dim=1)
    return [layer(parts[i]) for i, layer in enumerate((attended, *local))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Maps whose channels lie side by side as one map."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


@register_notrace_module
class ValueAttention(AttentionLayer):
    """Attention whose value is the input itself; only query and key are projected.

    The paper calls the feature map an identity; we follow the released code, which has elu + 1 and a normalizer.
    """

    def __init__(self, width: int, head_width: int, mechanism: str = "linear", **dd: Unpack[TensorOptions]) -> None:
        if width % head_width:
            raise SettingError(
                f"the width {width} of the attended channels is not a multiple of `head_width` {head_width}: change one"
            )
        super().__init__(width, width // head_width, mechanism, place="maps", **dd)
        self.qk = PointwiseConv(width, 2 * width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width) to a map of the same shape."""
        query, key = (tokens_of_map(y, self.heads) for y in self.qk(x).chunk(2, dim=1))
        value = tokens_of_map(x.to(query.dtype), self.heads)  # autocast projects in half precision
        grid = (x.shape[-2], x.shape[-1])
        return self.operator.as_map(self.operator(query, key, value, grid=grid), grid)


class TokenMixer(nn.Module):
    """Mix the tokens of each group of channels: one group by attention, the others by local depthwise convolutions.

    Args:
        width: channels of the features, without those of the memory.
        head_width: channels per head of the attention; unused for strips.
        mechanism: "strips" (strip convolutions), or a mechanism for maps: "linear" in the paper.
        split: which channels the attention gets: "asymmetric", a third of them, as released; "symmetric", half of them;
            "attended", all of them, without local convolutions; "stacked", all of them, after the local convolutions,
            the small one first (our reading of the paper's baseline after MLLA).
        local_sizes: kernel sizes of the local convolutions, which share the other channels: (3, 7), (3,) or (7,).
    """

    def __init__(
        self,
        width: int,
        head_width: int,
        mechanism: str,
        split: str = "asymmetric",
        local_sizes: tuple[int, ...] = LOCAL_SIZES,
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        sizes = () if split == "attended" else tuple(local_sizes)
        if split != "attended" and sizes not in (LOCAL_SIZES, *((size,) for size in LOCAL_SIZES)):
            raise SettingError(f"`local_sizes` is {sizes}, expected (3, 7), (3,) or (7,): choose one of them")
        self.stacked = split == "stacked"
        divisor = lookup("split", split, SHARES)
        attended, undivided = divmod(width, divisor)
        local, left = (attended, 0) if divisor == 1 else divmod(width - attended, len(sizes))
        if divisor > 1 and (undivided or left):
            raise SettingError(
                f"{width} feature channels cannot be divided by `split` {split!r} without a remainder: change the width"
            )
        # of the attended group, then of each local one; one number if every layer reads all channels
        self.widths = [attended] if divisor == 1 else [attended] + [local] * len(sizes)
        self.attended: Strips | ValueAttention = (
            Strips(attended, **dd) if mechanism == STRIPS else ValueAttention(attended, head_width, mechanism, **dd)
        )
        self.local3 = DepthwiseConv(local, (3, 3), **dd) if 3 in sizes else None
        self.local7 = DepthwiseConv(local, (7, 7), **dd) if 7 in sizes else None

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, width, height, width) to features of the same shape."""
        return joined(self.parts(x))

    def parts(self, x: Tensor) -> list[Tensor]:
        """The features as maps whose channels lie side by side."""
        local = [conv for conv in (self.local3, self.local7) if conv is not None]
        if self.stacked:
            for conv in (*local, self.attended):
                x = conv(x)
            return [x]
        return mixed(x, self.widths, self.attended, local)


class Interaction(nn.Module):
    """An inverted bottleneck that mixes channels: norm, 1×1, GELU, depthwise 3×3, 1×1, plus the input.

    Args:
        width: channels in.
        ratio: hidden channels over width.
        project: end with the last 1×1 convolution and the skip connection; otherwise return the hidden map.
    """

    def __init__(self, width: int, ratio: int, project: bool = True, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        hidden = width * ratio
        self.norm = nn.BatchNorm2d(width, **dd)
        self.fc1 = PointwiseConv(width, hidden, **dd)
        self.conv = DepthwiseConv(hidden, (3, 3), **dd)
        self.fc2 = PointwiseConv(hidden, width, **dd) if project else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = convolved(self.conv, self.fc1(self.norm(x)), gelu=True)
        return hidden if self.fc2 is None else self.fc2(hidden) + x

"""CARE's token mixer and its dual interaction (arXiv 2411.16170)."""

from collections.abc import Sequence

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from linvit.layers.checks import known
from linvit.layers.depthwise import DepthwiseConv
from linvit.layers.operator import MapSteps, Operands
from linvit.layers.pointwise import PointwiseConv

STRIPS = "strips"
LOCAL_SIZES = (3, 7)
SHARES = {"asymmetric": 3, "symmetric": 2, "stacked": 1, "attended": 1}  # one in so many channels is attended


class Strips(nn.Module):
    """Depthwise 11×1 plus 1×11 convolutions: the cheap stand-in for attention on large maps."""

    def __init__(self, width: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.vertical = DepthwiseConv(width, (11, 1), **dd)
        self.horizontal = DepthwiseConv(width, (1, 11), **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.vertical(x) + self.horizontal(x)


@register_notrace_module
class ValueAttention(MapSteps):
    """Attention whose value is the input itself; only query and key are projected.

    The paper calls the feature map an identity; the released code takes elu + 1 with a normaliser and is followed.
    """

    def __init__(self, width: int, head_width: int, mechanism: str = "linear", device=None, dtype=None):
        if width % head_width:
            raise ValueError(
                f"ValueAttention: width {width} is not a multiple of the head width {head_width}: change one"
            )
        super().__init__(width, width // head_width, mechanism, place="maps", device=device, dtype=dtype)
        self.qk = PointwiseConv(width, 2 * width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(self.operands(x))

    def operands(self, x: Tensor) -> Operands:
        """What enters the operator."""
        query, key = self.qk(x).chunk(2, dim=1)
        tokens = (query, key, x.to(query.dtype))  # autocast projects in half precision
        return self.operator.operands(*(self.by_head(y) for y in tokens), grid=tuple(x.shape[-2:]))


class TokenMixer(nn.Module):
    """Mix groups of channels apart from each other: some by attention, some by local depthwise convolutions.

    Args:
        width: channels of the features, those of the memory left out.
        head_width: channels of a head of the attended group; unused for strips.
        mechanism: "strips", or a mechanism: "linear" in the paper.
        split: "asymmetric" attends to a third of the channels, as released, "symmetric" to half of them, "attended" to
            all of them, without local convolutions; "stacked" sends all channels through the local convolutions, the
            small one first, and then through the attention (our reading of the paper's baseline after MLLA).
        local_sizes: sides of the local convolutions, which share the other channels evenly; (3, 7), (3,) or (7,).

    Raises:
        ValueError: for an unknown split or local size, and for a width that cannot be split.
    """

    def __init__(
        self,
        width: int,
        head_width: int,
        mechanism: str,
        split: str = "asymmetric",
        local_sizes: tuple[int, ...] = LOCAL_SIZES,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        sizes = () if split == "attended" else _known_sizes(local_sizes)
        self.stacked = split == "stacked"
        self.widths = _group_widths(width, split, len(sizes))
        attended, local = self.widths[0], self.widths[-1]
        self.attended = (
            Strips(attended, **dd) if mechanism == STRIPS else ValueAttention(attended, head_width, mechanism, **dd)
        )
        self.local3 = nn.Conv2d(local, local, 3, padding=1, groups=local, **dd) if 3 in sizes else None
        self.local7 = DepthwiseConv(local, (7, 7), **dd) if 7 in sizes else None

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, width, height, width) to features of the same shape."""
        local = [conv for conv in (self.local3, self.local7) if conv is not None]
        if self.stacked:
            for conv in local:
                x = conv(x)
            return self.attended(x)
        groups = x.split(self.widths, dim=1)
        return torch.cat([layer(groups[i]) for i, layer in enumerate((self.attended, *local))], dim=1)


def _known_sizes(local_sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(local_sizes)
    if sizes not in (LOCAL_SIZES, *((size,) for size in LOCAL_SIZES)):
        raise ValueError(f"`local_sizes` is {sizes}, expected (3, 7), (3,) or (7,): one convolution serves each size")
    return sizes


def _group_widths(width: int, split: str, num_local: int) -> list[int]:
    """Channels of the attended group, then of each local one; a single number where each group is all channels."""
    divisor = known("split", split, SHARES)
    attended, undivided = divmod(width, divisor)
    if divisor == 1:
        return [width]
    local, left = divmod(width - attended, num_local)
    if undivided or left:
        raise ValueError(
            f"the {split} split of {width} feature channels leaves a remainder: choose a width that it divides"
        )
    return [attended] + [local] * num_local


class Interaction(nn.Module):
    """An inverted bottleneck that lets channels speak to each other: norm, 1×1, GELU, depthwise 3×3, 1×1, plus input.

    Args:
        width: channels in.
        ratio: hidden channels over width.
        project: whether the last 1×1 convolution and the sum follow; without it the hidden map is the output.
    """

    def __init__(self, width: int, ratio: int, project: bool = True, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        hidden = width * ratio
        self.norm = nn.BatchNorm2d(width, **dd)
        self.fc1 = PointwiseConv(width, hidden, **dd)
        self.act = nn.GELU()
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **dd)
        self.fc2 = PointwiseConv(hidden, width, **dd) if project else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(self.act(self.fc1(self.norm(x))))
        if self.fc2 is None:
            return hidden
        return self.fc2(hidden) + x

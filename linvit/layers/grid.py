"""Where the tokens of an attention are: after a prefix, on one grid, or patches of images of different sizes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from linvit.arguments import check_dense
from linvit.errors import SettingError
from linvit.layers.operator import in_heads, merged
from linvit.ops import Rotary, rotary_2d


class ImagePatches:
    """Where the patches of a padded batch are: (batch, tokens, channels) ↔ (1, valid tokens, channels), packed.

    Args:
        coord: row and column of each patch, (batch, patches, 2), whole numbers from 0.
        valid: True for patches, False for padding, (batch, patches).
        num_prefix: tokens before the patches of each image.

    Attributes:
        grid: height and width in patches of the smallest map that every image fits into.
        cu_seqlens: the first token of each image among the valid ones, and their number, (batch + 1,).
    """

    def __init__(self, coord: Tensor, valid: Tensor, num_prefix: int) -> None:
        check_dense("patch_coord", coord)
        shape = tuple(coord.shape)
        if len(shape) != 3 or shape[-1] != 2 or coord.is_floating_point():
            raise SettingError(
                f"`patch_coord` is {coord.dtype} of shape {shape}, expected whole numbers of shape (batch, patches, 2)"
            )
        check_dense("patch_valid", valid)
        if valid.shape != shape[:2] or valid.dtype != torch.bool:
            raise SettingError(
                f"`patch_valid` is {valid.dtype} of shape {tuple(valid.shape)}, expected bool of shape "
                f"(batch, patches) = {shape[:2]}, as `patch_coord` has"
            )
        coord = coord.long().masked_fill(~valid.unsqueeze(-1), 0)
        height, width = (int(size) + 1 for size in coord.amax((0, 1)))
        self.grid, self.batch = (height, width), shape[0]
        self.valid = pad(valid, (num_prefix, 0), value=True)
        self.cu_seqlens = pad(self.valid.sum(1).cumsum(0), (1, 0))
        place = coord[..., 0] * width + coord[..., 1]
        prefix = torch.arange(num_prefix, device=coord.device).expand(self.batch, -1)
        self._row = torch.cat((prefix, num_prefix + place), dim=1)[self.valid]
        first = height * width * torch.arange(self.batch, device=coord.device).unsqueeze(1)
        # The prefix has the place behind all maps, which is cut off.
        self._place = pad(first + place, (num_prefix, 0), value=self.batch * height * width)[self.valid]

    def packed(self, x: Tensor) -> Tensor:
        """(batch, tokens, channels) → (1, valid tokens, channels)."""
        return x[self.valid].unsqueeze(0)

    def padded(self, x: Tensor) -> Tensor:
        """The opposite of `packed`, with zeros for padding."""
        return x.new_zeros(*self.valid.shape, x.shape[-1]).index_put((self.valid,), x[0])

    def on_maps(self, x: Tensor) -> Tensor:
        """(1, valid tokens, channels) → (batch, channels, height, width), zero where an image has no patch."""
        height, width = self.grid
        places = x.new_zeros(self.batch * height * width + 1, x.shape[-1]).index_copy(0, self._place, x[0])
        return places[:-1].view(self.batch, height, width, -1).permute(0, 3, 1, 2)

    def off_maps(self, maps: Tensor) -> Tensor:
        """The opposite of `on_maps`, with zeros for the prefix."""
        places = maps.permute(0, 2, 3, 1).flatten(0, 2)
        return pad(places, (0, 0, 0, 1))[self._place].unsqueeze(0)

    def of_grid(self, rotary: Rotary) -> Rotary:
        """The rows of a table of the prefix and the grid (…, num_prefix + height × width, pairs), for these tokens."""
        return Rotary(*(table[..., self._row, :] for table in rotary))

    def of_tokens(self, rotary: Rotary) -> Rotary:
        """The rows of a table of all tokens (batch, 1 or heads, tokens, pairs), for these tokens."""
        cos, sin = (table.transpose(1, 2)[self.valid].transpose(0, 1) for table in rotary)
        return Rotary(cos[0], sin[0]) if cos.shape[0] == 1 else Rotary(cos, sin)


class CurrentGrid:
    """`size`, the height and width in tokens of the latest images; None before the first.

    `patches` are those of the latest images, if they have different sizes. The last grid of every number of tokens is
    kept too, because a block that is recomputed in the backward pass may need the grid of earlier images. Two grids of
    equal area in one backward pass cannot be distinguished.
    """

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.patches: ImagePatches | None = None
        self._of_number: dict[int, tuple[int, int]] = {}

    def note(self, size: tuple[int, int], patches: ImagePatches | None = None) -> None:
        """Store the grid of the latest images, and their patches if they have different sizes."""
        self.size, self.patches = size, patches
        # a compiled network is compiled again whenever this dictionary grows
        if patches is None and not is_symbolic(size) and not torch.compiler.is_compiling():
            self._of_number[size[0] * size[1]] = size

    def of(self, number: int) -> tuple[int, int] | None:
        """The last grid with that many tokens; without one, and while torch.export traces any size, the latest grid."""
        if is_symbolic((number,)) or (self.size is not None and self.size[0] * self.size[1] == number):
            return self.size
        return self._of_number.get(number, self.size)


def is_symbolic(size: Sequence[int]) -> bool:
    """Whether numbers stand for any size, as torch.export traces them."""
    return any(isinstance(number, torch.SymInt) for number in size)


def whole(height: int, width: int) -> tuple[int, int]:
    """The size as Python's numbers, but for one that is symbolic, which int() would bind to that of the example."""
    return (height, width) if is_symbolic((height, width)) else (int(height), int(width))


class Places(NamedTuple):
    """The places of tokens (batch, tokens, channels): a prefix, then a grid (height, width) row by row.

    patches: those of images of different sizes, whose tokens are packed; grid is then that of the smallest map that
    every image fits into.
    """

    num_prefix: int
    grid: tuple[int, int]
    patches: ImagePatches | None = None

    def convolved(self, convolution: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """Values (batch, heads, tokens, width) convolved as one map of all heads' channels; zero for the prefix."""
        values = merged(value)
        if self.patches is not None:
            tokens = self.patches.off_maps(convolution(self.patches.on_maps(values)))
        else:
            as_map = values[:, self.num_prefix :].mT.unflatten(-1, self.grid)
            tokens = pad(convolution(as_map).flatten(2).mT, (0, 0, self.num_prefix, 0))
        return in_heads(tokens, value.shape[1])


def after_prefix(rotary: Rotary, num_prefix: int) -> Rotary:
    """The table with num_prefix tokens in front, which are not rotated."""
    if num_prefix == 0:
        return rotary
    cos = pad(rotary.cos, (0, 0, num_prefix, 0), value=1.0)
    return Rotary(cos, pad(rotary.sin, (0, 0, num_prefix, 0)))


def rotary_over_heads(x: Tensor, grid: tuple[int, int], heads: int, num_prefix: int, first_row: int) -> Rotary:
    """MLLA's rotation, which runs over all channels of x before they are split into heads; not of the prefix."""
    table = rotary_2d(grid, x.shape[-1], endpoint=False, first_row=first_row, dtype=x.dtype, device=x.device)
    cos, sin = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in after_prefix(table, num_prefix))
    return Rotary(cos, sin)


def timms_rotary(rope: Tensor, half: bool) -> Rotary:
    """timm's table, sines and then cosines, both for every channel, as one for pairs of channels."""
    sin, cos = rope.chunk(2, dim=-1)
    pairs = slice(rope.shape[-1] // 4) if half else slice(None, None, 2)
    return Rotary(cos[..., pairs], sin[..., pairs])

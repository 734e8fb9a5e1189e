"""Patches of images of different sizes in one batch, in timm's NaFlex convention, packed without their padding."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from linvit.arguments import form
from linvit.ops import Rotary


class ImagePatches:
    """Where the patches of a padded batch are: (batch, tokens, channels) ↔ (1, valid tokens, channels), packed.

    Args:
        coord: row and column of each patch, (batch, patches, 2), whole numbers from 0.
        valid: True for patches, False for padding, (batch, patches).
        num_prefix: tokens before the patches of each image.

    Attributes:
        grid: height and width in patches of the smallest map that every image fits into.
        cu_seqlens: the first token of each image among the valid ones, and their number, (batch + 1,).

    Raises ValueError for shapes that do not fit together, and for values that are not bool.
    """

    def __init__(self, coord: Tensor, valid: Tensor, num_prefix: int) -> None:
        shape, dtype, _ = form("patch_coord", coord)
        if len(shape) != 3 or shape[-1] != 2 or dtype.is_floating_point:
            raise ValueError(
                f"`patch_coord` is {dtype} of shape {tuple(shape)}, expected whole numbers of shape (batch, patches, 2)"
            )
        given, dtype, _ = form("patch_valid", valid)
        if given != shape[:2] or dtype != torch.bool:
            raise ValueError(
                f"`patch_valid` is {dtype} of shape {tuple(given)}, expected bool of shape (batch, patches) = "
                f"{tuple(shape[:2])}, as `patch_coord` has"
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

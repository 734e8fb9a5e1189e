"""Parts of a swapped network besides its attention: patch embedding, Swin block and feed-forward."""

from typing import cast

import torch
from timm.layers import Mlp, PatchEmbed, register_notrace_module
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype
from linvit.layers.token_attention import CurrentGrid, TokenAttention


@register_notrace_module
class GridPatchEmbed(PatchEmbed):
    """timm's patch embedding that also stores the grid of the images it reads; made by `watching`."""

    source: CurrentGrid

    @classmethod
    def watching(cls, embed: PatchEmbed, source: CurrentGrid) -> "GridPatchEmbed":
        """The same layer with the same parameters, which also stores the grid in source.

        Raises:
            ValueError: if it is not timm's PatchEmbed.
        """
        if type(embed) not in (PatchEmbed, GridPatchEmbed):
            raise ValueError(
                f"the patch embedding is a {type(embed).__name__}, expected timm's PatchEmbed: "
                "the grid of its tokens is unknown"
            )
        watching = cls.__new__(cls)
        watching.__dict__ = dict(embed.__dict__)
        watching.source = source
        return watching

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to tokens."""
        height, width = self.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        self.source.note((int(height), int(width)))
        x = PatchEmbed.forward(self, x)
        return x


class GlobalSwinBlock(nn.Module):
    """Swin's block with the whole map as its window: no shift, no mask, no table of relative positions.

    Args:
        block: the block whose norms, feed-forward and drop paths are reused.
        attention: replaces its window attention.
    """

    def __init__(self, block: SwinTransformerBlock, attention: TokenAttention) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = block.norm1, attention, block.drop_path1
        self.norm2, self.mlp, self.drop_path2 = block.norm2, block.mlp, block.drop_path2

    def set_input_size(
        self, feat_size: tuple[int, int], window_size: tuple[int, int], always_partition: bool | None = None
    ) -> None:
        """Does nothing: the window is the whole map, and position tables are interpolated."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, height, width, channels) to a map of the same shape."""
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height * width, channels)
        x = x + self.drop_path1(self.attn(self.norm1(x), [height, width]))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x.reshape(batch, height, width, channels)


@register_notrace_module
class LocalMlp(nn.Module):
    """timm's Mlp with a 3×3 depthwise convolution of its hidden map, before the activation.

    From enhanced linear attention (EfficientViT, first version, 2022). Its code is not public; we infer the place of
    the convolution from the abstract and the published sizes. A class token bypasses the convolution.

    Args:
        mlp: the feed-forward whose layers are reused.
        attention: the attention of the same block, which knows the grid.
    """

    def __init__(self, mlp: Mlp, attention: TokenAttention, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1, self.norm = mlp.fc1, mlp.act, mlp.drop1, mlp.norm
        self.fc2, self.drop2 = mlp.fc2, mlp.drop2
        hidden = cast(nn.Linear, mlp.fc1).out_features
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, device=device, dtype=dtype)
        self.num_prefix, self.last_grid = attention.num_prefix, attention.last_grid

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, prefix + height × width, channels) to the same shape, on the grid of the attention."""
        x = self.fc1(x)
        prefix, tokens = x[:, : self.num_prefix], x[:, self.num_prefix :]
        local = self.conv(tokens.mT.unflatten(-1, self.last_grid.size)).flatten(2).mT
        x = self.drop1(self.act(torch.cat((prefix, local), dim=1)))
        x = self.drop2(self.fc2(self.norm(x)))
        return x

"""Parts of a swapped network around its attention: embeddings, blocks of other layouts, and feed-forward."""

from typing import Any, TypeVar, Unpack, cast

import torch
from timm.layers import Mlp, PatchEmbed, register_notrace_module
from timm.models.naflexvit import NaFlexEmbeds
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.checks import TensorOptions
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.grid import CurrentGrid, ImagePatches, Places, whole
from linvit.layers.operator import in_heads, merged
from linvit.layers.token_attention import TokenAttention

Watching = TypeVar("Watching", bound=nn.Module)


@register_notrace_module
class GridPatchEmbed(PatchEmbed):
    """timm's patch embedding that also stores the grid of the images it reads; made by `watching`."""

    source: CurrentGrid

    @classmethod
    def watching(cls, embed: PatchEmbed, source: CurrentGrid) -> "GridPatchEmbed":
        """The same layer with the same parameters, which also stores the grid in source."""
        if type(embed) not in (PatchEmbed, GridPatchEmbed):
            raise ValueError(
                f"the patch embedding is a {type(embed).__name__}, expected timm's PatchEmbed: "
                "the grid of its tokens is unknown"
            )
        return _watching(cls, embed, source)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to tokens."""
        height, width = self.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        self.source.note(whole(height, width))
        return PatchEmbed.forward(self, x)


class GridNaFlexEmbeds(NaFlexEmbeds):
    """NaFlexVit's embedding that also stores the grid of the images it reads; made by `watching`."""

    source: CurrentGrid

    @classmethod
    def watching(cls, embed: NaFlexEmbeds, source: CurrentGrid) -> "GridNaFlexEmbeds":
        """The same layer with the same parameters, which also stores the grid in source."""
        return _watching(cls, embed, source)

    def forward(
        self, x: Tensor, patch_coord: Tensor | None = None, patch_valid: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int] | None]:
        """As timm's. Raises ValueError for patch_coord and patch_valid that do not fit the patches."""
        if patch_coord is None:
            tokens, size = super().forward(x)
            assert size is not None
            self.source.note(whole(*size))
            return tokens, size
        patches = ImagePatches(patch_coord, cast(Tensor, patch_valid), self.num_prefix_tokens)
        if patch_coord.shape[:2] != x.shape[:2]:
            raise SettingError(
                f"`patch_coord` has shape {tuple(patch_coord.shape)} for patches of shape {tuple(x.shape)}, expected "
                "a row and a column for each patch"
            )
        self.source.note(patches.grid, patches)
        return super().forward(x, patch_coord, patch_valid)


def _watching(kind: type[Watching], embed: nn.Module, source: CurrentGrid) -> Watching:
    watching = kind.__new__(kind)
    watching.__dict__ = {**embed.__dict__, "source": source}
    return watching


class FlatAttention(nn.Module):
    """Attention as blocks call it that pass no grid: SAM's over a map (batch, height, width, channels), and Hiera's
    over tokens (batch, tokens, channels) whose order is not that of a grid.

    Args:
        tokens: the attention of the flattened map; without local terms, rotation and tables of positions in Hiera.
    """

    def __init__(self, tokens: TokenAttention) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        """To the same shape."""
        height, width = x.shape[1:-1] if x.ndim == 4 else (1, x.shape[1])
        return self.tokens(x.flatten(1, -2), [height, width]).view_as(x)


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
class LocalBlock(Block):
    """timm's block with a 3×3 depthwise convolution of its input, added to it; its attention is swapped.

    ViT³ has it as its encoding of positions.
    """

    def __init__(self, dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.cpe = DepthwiseConv(dim, (3, 3), device=options.get("device"), dtype=options.get("dtype"))

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Tokens (batch, prefix + height × width, channels) to the same shape; a prefix is not convolved."""
        attention = cast(TokenAttention, self.attn)
        places = Places(attention.num_prefix, attention.known_grid(x, None))
        x = x + merged(places.convolved(self.cpe, in_heads(x, 1)))
        out: Tensor = super().forward(x, *arguments, **options)
        return out


@register_notrace_module
class LocalMlp(nn.Module):
    """timm's Mlp with a 3×3 depthwise convolution of its hidden map, before the activation.

    From enhanced linear attention (EfficientViT, first version, 2022). Its code is not public; we infer the place of
    the convolution from the abstract and the published sizes. A class token bypasses the convolution.

    Args:
        mlp: the feed-forward whose layers are reused.
        attention: the attention of the same block, which knows the grid.
    """

    def __init__(self, mlp: Mlp, attention: TokenAttention, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1, self.norm = mlp.fc1, mlp.act, mlp.drop1, mlp.norm
        self.fc2, self.drop2 = mlp.fc2, mlp.drop2
        hidden = cast(nn.Linear, mlp.fc1).out_features
        self.conv = DepthwiseConv(hidden, (3, 3), **dd)
        self.num_prefix, self.last_grid = attention.num_prefix, attention.last_grid
        attention.mixes_sizes = False

    def reset_to_identity(self) -> None:
        """Makes the convolution the identity."""
        nn.init.dirac_(self.conv.weight, groups=self.conv.groups)
        nn.init.zeros_(cast(nn.Parameter, self.conv.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, prefix + height × width, channels) to the same shape, on the grid of the attention."""
        x = self.fc1(x)
        prefix, tokens = x[:, : self.num_prefix], x[:, self.num_prefix :]
        local = self.conv(tokens.mT.unflatten(-1, self.last_grid.size)).flatten(2).mT
        x = self.drop1(self.act(torch.cat((prefix, local), dim=1)))
        return self.drop2(self.fc2(self.norm(x)))

"""DiT: a vision transformer that predicts the noise in an image, with softmax, linear, MALA or RALA attention.

Paper: *Scalable Diffusion Models with Transformers* (ICCV 2023, arXiv 2212.09748): patches of latents, fixed sine
positions, and blocks whose norms are shifted, scaled and gated by time and class, initially by zero (adaLN-Zero).
MALA's Table 8 compares a linear DiT with DiT-S/2, but that network is not released, and replacing only the attention of
DiT-S/2 does not lead to its FLOPs, see the page Image generation. Here only the attention is replaced; a depthwise 3×3
convolution of v and the width of the feed-forward are options.

| name | input | channels | layers | heads | patch |
|---|---|---:|---:|---:|---:|
| dit_nano_patch2 | 1×8×8 | 64 | 4 | 4 | 2 |
| dit_small_patch2 | 4×32×32 | 384 | 12 | 6 | 2 |
| dit_base_patch2 | 4×32×32 | 768 | 12 | 12 | 2 |
| dit_large_patch2 | 4×32×32 | 1,024 | 24 | 16 | 2 |
| dit_xlarge_patch2 | 4×32×32 | 1,152 | 28 | 16 | 2 |
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack, cast

import torch
from timm.layers import Mlp, PatchEmbed, build_sincos2d_pos_embed
from torch import Tensor, nn
from torch.nn.functional import silu

from linvit.errors import refuse
from linvit.layers.checks import (
    Depth,
    Device,
    Dtype,
    Ratio,
    Scale,
    TensorOptions,
    check_filled,
    check_floats,
    check_whole_numbers,
    multiple_of_heads,
)
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.mechanisms import at
from linvit.layers.token_attention import TokenAttention
from linvit.ranges import Checked, Count, lookup

FREQUENCIES = 256  # sine and cosine features of the time
TIMES = 1_000  # steps of the noise process

_LATENTS = {"input_size": 32, "channels": 4, "patch_size": 2}
SIZES: Mapping[str, dict[str, int]] = {
    "dit_nano_patch2": {"input_size": 8, "channels": 1, "patch_size": 2, "width": 64, "depth": 4, "heads": 4},
    "dit_small_patch2": {**_LATENTS, "width": 384, "depth": 12, "heads": 6},
    "dit_base_patch2": {**_LATENTS, "width": 768, "depth": 12, "heads": 12},
    "dit_large_patch2": {**_LATENTS, "width": 1024, "depth": 24, "heads": 16},
    "dit_xlarge_patch2": {**_LATENTS, "width": 1152, "depth": 28, "heads": 16},
}


class DiTAttention(TokenAttention):
    """Attention over the patches of an image; `local` adds a depthwise 3×3 convolution of v."""

    local_layer = "local"

    def __init__(
        self, width: int, heads: int, mechanism: str, grid: tuple[int, int], local: bool, **dd: Unpack[TensorOptions]
    ) -> None:
        super().__init__(width, heads, mechanism, grid, **dd)
        convolution = DepthwiseConv(width, (3, 3), **dd)
        self.local = convolution if local else None


class DiTBlock(nn.Module):
    """Attention, then feed-forward, each between a norm and a gate set by the condition; initially the identity."""

    def __init__(
        self, width: int, heads: int, mechanism: str, grid: tuple[int, int], mlp_ratio: float, local: bool, **dd: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = DiTAttention(width, heads, mechanism, grid, local, **dd)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        gelu = cast(type[nn.Module], partial(nn.GELU, approximate="tanh"))
        self.mlp = Mlp(width, int(width * mlp_ratio), act_layer=gelu, **dd)
        self.modulation = nn.Linear(width, 6 * width, **dd)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) under a condition (batch, width)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(Checked, nn.Module):
    """Predicts the noise in images, given time and class.

    Args:
        num_classes: number of classes; the label num_classes means no class.
        input_size, channels: side and channels of the square images or latents.
        patch_size: side of a patch; divides input_size.
        width, depth, heads: channels, blocks, heads.
        mechanism: a name in MECHANISMS that can be used for images.
        mlp_ratio: hidden channels of the feed-forward over width.
        local: add a depthwise 3×3 convolution of v to the attention.
        learn_sigma: also predict the variance, in as many further channels: its position between its bounds (−1 … 1).
        label_std: standard deviation of the label embedding at initialization. 0.02 as released; short trainings learn
            more from labels with a larger value.

    Raises ValueError for an argument outside its range, and for sizes that do not fit together.
    """

    positions: Tensor

    def __init__(
        self,
        num_classes: Count,
        input_size: Count,
        channels: Count,
        patch_size: Count,
        width: Count,
        depth: Depth,
        heads: Count,
        mechanism: str = "softmax",
        mlp_ratio: Ratio = 4.0,
        local: bool = False,
        learn_sigma: bool = False,
        label_std: Scale = 0.02,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        lookup("mechanism", mechanism, at("images"))
        multiple_of_heads(width, heads)
        refuse(
            input_size % patch_size
            and f"`input_size` is {input_size}, which is not a multiple of `patch_size` {patch_size}: change one of the"
            " two",
            width * mlp_ratio < 1
            and f"`mlp_ratio` is {mlp_ratio}, which leaves no channels to the feed-forward: set it higher",
            width % 4 and f"`width` is {width}, but positions in two dimensions need a multiple of 4: change it",
        )
        self.num_classes, self.input_size, self.channels = num_classes, input_size, channels
        self.mechanism, self.learn_sigma, self.label_std = mechanism, learn_sigma, label_std
        self.out_channels = channels * (2 if learn_sigma else 1)
        self.patch_size = patch_size
        self.patch_embed = PatchEmbed(input_size, patch_size, channels, width, **dd)
        side = input_size // patch_size
        positions = build_sincos2d_pos_embed([side, side], width, interleave_sin_cos=False)
        self.register_buffer("positions", positions.to(**dd), persistent=False)
        self.time_embed = Mlp(FREQUENCIES, width, width, act_layer=nn.SiLU, **dd)
        self.label_embed = nn.Embedding(num_classes + 1, width, **dd)
        self.blocks = nn.ModuleList(
            DiTBlock(width, heads, mechanism, (side, side), mlp_ratio, local, **dd) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width, **dd)
        self.head = nn.Linear(width, patch_size**2 * self.out_channels, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: Xavier for linear layers and patches, normal for embeddings, zero for modulations and head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))
        assert self.patch_embed.proj.bias is not None
        nn.init.zeros_(self.patch_embed.proj.bias)
        nn.init.normal_(self.label_embed.weight, std=self.label_std)
        for layer in (self.time_embed.fc1, self.time_embed.fc2):
            nn.init.normal_(layer.weight, std=0.02)
        gates = (cast(DiTBlock, block).modulation for block in self.blocks)
        for layer in (*gates, self.modulation, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """The noise (batch, out_channels, height, width) in images (batch, channels, height, width).

        Args:
            images: floating point, input_size high and wide.
            times: int64 (batch,), steps of the noise process, 0 … 999.
            labels: int64 (batch,), classes, or num_classes for none.

        Raises TypeError or ValueError for inputs of the wrong type, shape or range.
        """
        size = ("batch", self.channels, self.input_size, self.input_size)
        check_floats("images", images, size, "create the DiT with their `channels` and `input_size`")
        check_filled("images", images)
        check_whole_numbers("times", times, (len(images),), 0, TIMES - 1)
        check_whole_numbers("labels", labels, (len(images),), 0, self.num_classes)
        x = self.patch_embed(images) + self.positions.to(images.dtype)
        condition = self.time_embed(time_features(times, x.dtype)) + self.label_embed(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(silu(condition)).unsqueeze(1).chunk(2, -1)
        patches: Tensor = self.head(self.norm(x) * (1 + scale) + shift)
        side, patch = self.input_size // self.patch_size, self.patch_size
        patches = patches.unflatten(1, (side, side)).unflatten(-1, (patch, patch, self.out_channels))
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def time_features(times: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the times at 128 frequencies, (batch, 256)."""
    half = FREQUENCIES // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=times.device) / half)
    angles = times[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)

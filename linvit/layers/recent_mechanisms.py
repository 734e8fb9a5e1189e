"""Mechanisms published after RALA and MALA: NaLaFormer, PolaFormer++, RecNeXt's attention, ViT³, MHLA."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import get_device_dtype, trunc_normal_
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad, silu, unfold

from linvit.formulas.feature_map import relu_eps
from linvit.layers.checks import TensorOptions, check_turns
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.grid import Places, rotary_over_heads
from linvit.layers.operator import NO_SCORES, Operator, in_heads, merged, rotated
from linvit.layers.token_attention import GatedAttention, TokenAttention
from linvit.ops import Rotary
from linvit.ops.linear_attention import without_autocast
from linvit.ops.mixing import blocks_of_grid
from linvit.ops.state import accumulator_dtype
from linvit.ranges import Count


class NormAwareAttention(GatedAttention):
    """Norm-aware linear attention (NaLaFormer, ICML 2026, arXiv 2506.21137), as released.

    For the operator a head has queries [q, -q] and keys [k, -k], twice as wide as its values: κ of the queries is
    `norm_power`, of the keys `relu_cubed`. The rotation turns q and -q alike. A 5×5 depthwise convolution of v is
    added, all heads are normalized together, and the result is multiplied by the SiLU of a projection of x. The paper
    also maps directions through cosine and sine, with two settings that the code does not have.

    Args:
        lepe, rope: as in GatedAttention.
    """

    rotates = False
    fixed = ("modulation",)
    STARTS_AT_ONE = 1.278464542761074  # whose SiLU is 1

    def __init__(
        self, width: int, heads: int, mechanism: str, grid: tuple[int, int], num_prefix: int = 0, **options: Any
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, modulation="linear", **options)
        self.modulate = nn.SiLU()
        self.ln = nn.LayerNorm(width, **get_device_dtype(self.qkv))

    @staticmethod
    def size_of_operator(width: int, heads: int) -> tuple[int, int]:
        return heads, 2 * width // heads

    def reset_to_operator(self) -> None:
        """Local term 0, gate 1, and a learned rotation by 0; the norm stays."""
        assert self.modulation is not None
        modulate, self.modulate = self.modulate, nn.Identity()
        super().reset_to_operator()
        self.modulate = modulate
        nn.init.constant_(self.modulation.bias, self.STARTS_AT_ONE)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(x, grid)
        return torch.cat((query, -query), dim=-1), torch.cat((key, -key), dim=-1), value

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        rotary = super().rotary(x, grid)
        return rotary if rotary is None else Rotary(*(torch.cat((table, table), dim=-1) for table in rotary))

    def gated(self, y: Tensor, x: Tensor) -> Tensor:
        return super().gated(in_heads(self.ln(merged(y)), self.heads), x)


class ScaledPolarAttention(GatedAttention):
    """PolaFormer++'s attention, as released (github.com/ZacharyMeng/PolaFormerPP; there is no paper).

    One half of a head's values is read by the scores of equal signs, the other half by those of opposite signs. For the
    operator every head becomes two, with keys [k, -k], queries σ(s₁)·[q, -q] and σ(s₂)·[-q, q], and κ `relu_expm1`; s₁
    and s₂ are learned for each channel of a head. The rotation turns the positive half by the row and the negative half
    by the column. A 5×5 depthwise convolution of v is added; the gate is a projection of x.

    Args:
        modulation, lepe, rope: as in GatedAttention.
    """

    rotates = False
    turned = 2

    def __init__(
        self, width: int, heads: int, mechanism: str, grid: tuple[int, int], num_prefix: int = 0, **options: Any
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, **options)
        check_turns(self.operator.head_width // 2)
        self.sharpness = nn.Parameter(self.qkv.weight.new_empty(self.heads, 2, 1, self.operator.head_width))
        self.reset_parameters()

    @staticmethod
    def size_of_operator(width: int, heads: int) -> tuple[int, int]:
        return 2 * heads, 2 * width // heads

    def reset_parameters(self) -> None:
        """Multiplies every query by 1/2."""
        super().reset_parameters()
        nn.init.zeros_(self.sharpness)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(x, grid)
        halves = value.unflatten(-1, (2, -1)).movedim(-2, 2)
        signed = torch.cat((query, -query), dim=-1)
        queries = torch.stack((signed, -signed), dim=2) * self.sharpness.sigmoid()
        keys = torch.cat((key, -key), dim=-1).repeat_interleave(2, dim=1)
        return queries.flatten(1, 2), keys, halves.flatten(1, 2)


class RecNeXtAttention(TokenAttention):
    """The linear attention of RecNeXt-A (github.com/suous/RecNeXt, 2025; there is no paper).

    Batch norms of queries and keys, vanilla linear attention, and a 3×3 depthwise convolution of v with a batch norm.
    RecNeXt has v = x, projects each half of the channels by itself, the first to queries and the second to keys, and
    has no projection of the output; in DeiT and Swin qkv and proj are kept. A class token is normalized like a patch.

    Args:
        half: compute the attention of a map of half the height and width, as released: a 5×5 depthwise convolution with
            stride 2 is before it, the nearest values are taken after it and added to x, and another 5×5 convolution
            follows, all with batch norms. A class token bypasses the convolutions.
    """

    mixes_sizes = False
    starts_at_zero = ("lepe.1.weight",)

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        half: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, **options)
        dd = get_device_dtype(self.qkv)
        self.stride = 2 if half else 1
        self.qk_norm: nn.Module = nn.BatchNorm1d(2 * width, **dd)
        self.lepe = _convolution_and_norm(width, 3, 1, dd)
        self.down = _convolution_and_norm(width, 5, 2, dd) if half else None
        self.up = _convolution_and_norm(width, 5, 1, dd) if half else None

    def input_layers(self) -> list[nn.Module]:
        return super().input_layers() if self.down is None else []

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        if self.down is not None:
            prefix, tokens = x[:, : self.num_prefix], x[:, self.num_prefix :]
            smaller = self.down(tokens.mT.unflatten(-1, grid)).flatten(2).mT
            x = torch.cat((prefix, smaller), dim=1)
        projected: Tensor = self.qkv(x)
        query_and_key, value = projected.split((2 * x.shape[-1], x.shape[-1]), dim=-1)
        query, key = self.qk_norm(query_and_key.mT).mT.chunk(2, dim=-1)
        query, key, value = (in_heads(each, self.heads) for each in (query, key, value))
        return self.q_norm(query), self.k_norm(key), value

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        if self.up is None:
            return y + places.convolved(self.lepe, value)
        height, width = places.grid
        small = Places(self.num_prefix, (-(-height // 2), -(-width // 2)))
        y = merged(y + small.convolved(self.lepe, value))
        prefix, tokens = y[:, : self.num_prefix], y[:, self.num_prefix :]
        larger = interpolate(tokens.mT.unflatten(-1, small.grid), places.grid).flatten(2).mT
        summed = in_heads(x + torch.cat((prefix, larger), dim=1), self.heads)
        with_prefix = pad(summed[:, :, : self.num_prefix], (0, 0, 0, larger.shape[1]))
        return with_prefix + places.convolved(self.up, summed)


def _convolution_and_norm(width: int, side: int, stride: int, dd: dict[str, Any]) -> nn.Sequential:
    """A depthwise convolution without a bias, and its batch norm."""
    conv = nn.Conv2d(width, width, side, stride, side // 2, groups=width, bias=False, **dd)
    return nn.Sequential(conv, nn.BatchNorm2d(width, **dd))


class InnerStep(Operator):
    """What ViT³ has in place of attention: one step of gradient descent on keys and values, then a read of the result.

    A small network f(x) = (x W₁) ⊙ SiLU(x W₂) for each head has learned initial weights. The step of rate 1 minimizes
    -mean_t f(k_t)·v_t / 3 for all tokens of an image at once, and a query reads f(q) of the new weights. The gradient
    is a sum over the tokens, in float32 (float64 for float64 inputs), under autocast too; each of its columns g is
    divided by 1 + ‖g‖, whose derivative at g = 0 is taken to be 0.
    """

    nonlinear = True
    SCALE = 1 / 3  # 9^-½, the released factor of the loss in both branches

    def __init__(self, mechanism: str, heads: int, head_width: int, **options: Any) -> None:
        super().__init__(mechanism, heads, head_width, **options)
        dd = {name: options.get(name) for name in ("device", "dtype")}
        self.w1 = nn.Parameter(torch.empty(heads, head_width, head_width, **dd))
        self.w2 = nn.Parameter(torch.empty(heads, head_width, head_width, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial weights: small random numbers."""
        for parameter in self.parameters():
            trunc_normal_(parameter, std=0.02)

    def sums(self, key: Tensor, value: Tensor) -> Tensor:
        """Σ_t ∂(f(k_t)·v_t)/∂[W₁, W₂] over rotated keys, (batch, heads, width, 2 · width).

        The sums of parts of an image add up to those of all of it.
        """
        first, second = (key @ torch.cat((self.w1, self.w2), dim=-1).to(key.dtype)).chunk(2, dim=-1)
        gate = second.sigmoid()
        slope = gate * (1 + second * (1 - gate))
        return key.mT @ torch.cat((value * second * gate, value * first * slope), dim=-1)

    def updated(self, sums: Tensor, tokens: int) -> Tensor:
        """[W₁, W₂] after the step on so many tokens, (batch, heads, width, 2 · width)."""
        return stepped(torch.cat((self.w1, self.w2), dim=-1).to(sums.dtype), sums * (-self.SCALE / tokens))

    def scores(self, *inputs: Any, **options: Any) -> Tensor:
        """Raises ValueError: there is no such matrix."""
        raise ValueError(NO_SCORES)

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None = None, **unused: None
    ) -> Tensor:
        """As of Operator, for every query f(q) of the new weights; all tokens are seen."""
        dtype, wide = value.dtype, accumulator_dtype(value.dtype)
        with without_autocast(query.device.type):
            query, key, value = (x.to(wide) for x in (query, key, value))
            query, key = rotated(query, key, rotary)
            weights = self.updated(self.sums(key, value), key.shape[-2])
            first, second = (query @ weights).chunk(2, dim=-1)
            return (first * silu(second)).to(dtype)


class InnerStepAttention(TokenAttention):
    """ViT³'s layer (CVPR 2026, arXiv 2512.01643), as released: an InnerStep, and beside it the same for a convolution.

    The second branch has a head of its own, queries, keys and values from a second projection, and a learned 3×3
    depthwise kernel: one step with the gradient of -mean_p (kernel ∗ k)_p·v_p / 3, summed over the pixels, gives each
    image its own kernel, which convolves the queries. The output is a projection of both branches; qkv and proj of a
    network are those of the first. Any grid; a class token, which ViT³ does not have, is a token like others of
    the first branch and not in the second. The read is nonlinear in the values, so that there is no matrix of scores.

    Args:
        rope: rotate queries and keys of the first branch as in MLLA, which H-ViT³ does.
    """

    operator_class = InnerStep
    mixes_sizes = False

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        rope: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, **options)
        head_width, dd = width // heads, get_device_dtype(self.qkv)
        if rope:
            check_turns(width, axes=2)
            check_turns(head_width)
        self.rope = rope
        self.local_qkv = nn.Linear(width, 3 * head_width, bias=self.qkv.bias is not None, **dd)
        self.local_proj = nn.Linear(head_width, width, bias=False, **dd)
        self.w3 = nn.Parameter(torch.empty(head_width, 3, 3, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial kernel: small random numbers."""
        trunc_normal_(self.w3, std=0.02)

    def input_layers(self) -> list[nn.Module]:
        return [*super().input_layers(), self.local_qkv]

    def output_layers(self) -> list[nn.Module]:
        return [*super().output_layers(), self.local_proj]

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        return rotary_over_heads(x, grid, self.heads, self.num_prefix, self.first_row) if self.rope else None

    def projected(self, y: Tensor, x: Tensor, places: Places) -> Tensor:
        local = self.local_proj(self.local(x[:, self.num_prefix :], places.grid))
        return super().projected(y, x, places) + pad(local, (0, 0, self.num_prefix, 0))

    def local(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The second branch, tokens of the grid (batch, tokens, channels) to (batch, tokens, head width)."""
        qkv: Tensor = self.local_qkv(x)
        wide = accumulator_dtype(qkv.dtype)
        with without_autocast(x.device.type):
            query, key, value = qkv.to(wide).mT.chunk(3, dim=1)
            weight = self.updated(key, value, grid)
            maps = query.unflatten(-1, grid).flatten(0, 1).unsqueeze(0)
            out = conv2d(maps, weight.flatten(0, 1).unsqueeze(1), padding=1, groups=maps.shape[1])
            return out.view_as(query).mT.to(qkv.dtype)

    def updated(self, key: Tensor, value: Tensor, grid: tuple[int, int]) -> Tensor:
        """The kernel of each image after the step, (batch, head width, 3, 3); key, value: (batch, width, tokens)."""
        around = unfold(key.unflatten(-1, grid), 3, padding=1).unflatten(1, (-1, 9))
        sums = (around @ value.unsqueeze(-1)).squeeze(-1)
        gradient = sums * (-InnerStep.SCALE / value.shape[-1])
        return stepped(self.w3.flatten(1).mT.to(gradient.dtype), gradient.mT).mT.unflatten(-1, (3, 3))


def stepped(weight: Tensor, gradient: Tensor) -> Tensor:
    """The weight minus its gradient, each column of which is divided by 1 plus its norm."""
    return weight - gradient / (1 + torch.linalg.vector_norm(gradient, dim=-2, keepdim=True))


class MHLAAttention(TokenAttention):
    """Multi-head linear attention by blocks (MHLA, ICLR 2026, arXiv 2601.07832), with the layers of its released code.

    A second layer norm before qkv, RMS norms of all channels of queries and keys, blocks of tokens whose states a
    learned matrix mixes, and a 5×5 depthwise convolution of v.

    The released code divides by Σ_b m_ib (κ(q of block b at the same place)·z_b), which takes the queries of other
    blocks, where the paper's Eq. 4 takes the token's own query, as we do. It pads images of 224 px to 256 px.

    Args:
        blocks: (rows, columns) of blocks on the grid.
        released_denominator: divide as the released code does, for comparisons with it: for equal blocks without a
            class token; scores are then those before the division.
    """

    local_layer = "lepe"
    starts_at_zero = ("lepe",)

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        blocks: tuple[Count, Count] = (4, 4),
        released_denominator: bool = False,
        **options: Any,
    ) -> None:
        if released_denominator:
            options["normalizer"] = "sum"
        super().__init__(width, heads, mechanism, grid, num_prefix, blocks=blocks, **options)
        self.released_denominator = released_denominator

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        self.input_norm = nn.LayerNorm(width, **dd)
        self.query_norm = nn.RMSNorm(width, **dd)
        self.key_norm = nn.RMSNorm(width, **dd)
        self.lepe = DepthwiseConv(width, (5, 5), **dd)

    def input_layers(self) -> list[nn.Module]:
        return []  # the norm

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(self.input_norm(x), grid)
        norms = ((self.query_norm, query), (self.key_norm, key))
        return *(in_heads(norm(merged(y)), self.heads) for norm, y in norms), value

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        if self.released_denominator:
            y = y / (self._denominator(x, places.grid) + 1e-6)
        return super().with_local(y, value, x, places)

    def _denominator(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """That of the released code, (batch, heads, tokens, 1)."""
        query, key, _ = self.query_key_value(x, grid)
        options = self.operator.axes(key, grid=grid)
        blocks = blocks_of_grid(grid, options["blocks"], x.shape[1] - grid[0] * grid[1], x.device)
        query, key = (blocks.split(relu_eps(y)) for y in (query, key))
        by_block = query @ key.sum(-2).unsqueeze(-1)
        mixed = options["mixing"] @ by_block.squeeze(-1)
        return blocks.join(mixed.unsqueeze(-1))

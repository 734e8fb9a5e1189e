"""Attention over tokens in the place of timm's `Attention`: qkv and proj stay, what lies between them is exchanged."""

from collections.abc import Callable, Sequence
from math import pi
from typing import Any

from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from linvit.layers.attention import MODULATIONS
from linvit.layers.checks import known
from linvit.layers.depthwise import DepthwiseConv
from linvit.layers.operator import AttentionSteps, Operands, merged
from linvit.ops import Rotary, rotary_2d


class CurrentGrid:
    """Height and width in tokens of the images at hand, `size`; None before the first.

    The last grid of every number of tokens is kept too: a block that is recomputed in the backward pass may meet images
    of a size other than the latest. Only two grids of equal area in one backward pass cannot be told apart.
    """

    def __init__(self):
        self.size: tuple[int, int] | None = None
        self._of_number: dict[int, tuple[int, int]] = {}

    def note(self, size: tuple[int, int]) -> None:
        """These are the images at hand."""
        self.size = self._of_number[size[0] * size[1]] = size

    def of(self, number: int) -> tuple[int, int] | None:
        """The last grid of that many tokens; that of the images at hand where there was none."""
        return self._of_number.get(number, self.size)


@register_notrace_module
class TokenAttention(AttentionSteps):
    """proj(operator(qkv(x))): a mechanism that needs nothing around its operator; one opaque step for tracers.

    Subclasses change what enters the operator (`query_key_value`, `rotary`, `feature_map`), add a local term
    (`with_local`) or a gate (`gated`).

    Args:
        width, heads, mechanism, operator_size: as in AttentionSteps.
        grid: (height, width) in tokens for which tables of positions are made; other sizes are interpolated.
        num_prefix: tokens before those of the grid, such as a class token; local terms and rotations leave them alone.
        source: where the grid of the images at hand is found when forward is not given one.
        qkv_bias, proj_bias, proj_drop: as in timm.
        axes: feature_map, weighting, normalizer other than the mechanism's own, see Operator.

    Raises:
        ValueError: as AttentionSteps.
    """

    read_share, value_share = 1.0, 0.0

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        source: CurrentGrid | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        operator_size: tuple[int, int] | None = None,
        device=None,
        dtype=None,
        **axes,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(width, heads, mechanism, operator_size, **axes, **dd)
        self.grid, self.num_prefix, self.source = tuple(grid), num_prefix, source
        self.last_grid = CurrentGrid()
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias, **dd)
        self.proj = nn.Linear(width, width, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Tensor, grid: list[int] | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Tokens (batch, prefix + height × width, channels) to tokens of the same shape.

        Args:
            x: the tokens, row by row behind the prefix.
            grid: their height and width; the source's when None.
            attn_mask, is_causal: as timm's blocks pass them; None and False.

        Raises:
            ValueError: for a mask, and for a number of tokens that is not the grid's.
        """
        if attn_mask is not None or is_causal:
            raise ValueError("the attention got a mask, expected none: a swapped attention sees every token")
        size = self.known_grid(x, grid)
        self.last_grid.note(size)
        return self.proj_drop(self.proj(merged(self.attended(self.operands(x, size)))))

    def operands(self, x: Tensor, grid: tuple[int, int]) -> Operands:
        """What enters the operator, from tokens (batch, tokens, channels)."""
        steps: dict[str, Any] = {"x": x, "grid": grid, "num_prefix": self.num_prefix}
        shares = {"read_share": self.read_share, "value_share": self.value_share}
        tokens = self.query_key_value(x, grid)
        return self.operator.operands(*tokens, self.rotary(x, grid), self.feature_map(), **shares, **steps)

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        """The rotation of the tokens of a grid; none here."""
        return None

    def feature_map(self) -> Callable[[Tensor], Tensor] | None:
        """A feature map with parameters of the layer, in place of the mechanism's own; none here."""
        return None

    def input_layers(self) -> list[nn.Module]:
        """Every layer that reads the input; none where it is also used in another way."""
        return [self.qkv]

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        """Each (batch, heads, tokens, width)."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def known_grid(self, x: Tensor, grid: Sequence[int] | None) -> tuple[int, int]:
        """Height and width of the tokens behind the prefix."""
        if grid is None:
            grid = None if self.source is None else self.source.of(x.shape[1] - self.num_prefix)
        height, width = self.grid if grid is None else grid
        if x.shape[1] != self.num_prefix + height * width:
            raise ValueError(
                f"{type(self).__name__} got {x.shape[1]} tokens, expected {self.num_prefix} + {height} × {width}: "
                "dropped or pruned patches have no grid, keep them all"
            )
        return int(height), int(width)


def convolved(convolution: Callable[[Tensor], Tensor], operands: Operands) -> Tensor:
    """The values, (batch, heads, tokens, width), convolved over the channels of all heads; zero for the prefix."""
    as_map = merged(operands.value)[:, operands.num_prefix :].mT.unflatten(-1, operands.grid)
    tokens = pad(convolution(as_map).flatten(2).mT, (0, 0, operands.num_prefix, 0))
    return tokens.unflatten(-1, (operands.value.shape[1], -1)).transpose(1, 2)


def behind_prefix(rotary: Rotary, num_prefix: int) -> Rotary:
    """The table with tokens in front that do not turn."""
    if num_prefix == 0:
        return rotary
    cos = pad(rotary.cos, (0, 0, num_prefix, 0), value=1.0)
    return Rotary(cos, pad(rotary.sin, (0, 0, num_prefix, 0)))


class Hydra(TokenAttention):
    """Hydra attention (Bolya et al., 2022): as many heads as channels, so that one vector gates every token.

    The paper replaces the last layers of a ViT; here, as in FLatten's comparison, any.
    """

    def __init__(self, width: int, heads: int, *args, **kwargs):
        super().__init__(width, heads, *args, operator_size=(width, 1), **kwargs)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        return [merged(tokens).mT.unsqueeze(-1) for tokens in super().query_key_value(x, grid)]


class LinearAngular(TokenAttention):
    """Linear angular attention (Castling-ViT, CVPR 2023), inference form: y/|y| + 9 taps along the tokens of v.

    y = v/2 + q̂ Σ_j k̂_j ⊗ v_j / π. The paper's first-order term would be Σ_j v_j / 2; the code, which is followed, has
    the token's own value. Its masked softmax branch exists in training only and is left out.
    """

    read_share, value_share = 1 / pi, 0.5

    def __init__(self, width: int, heads: int, mechanism: str, *args, device=None, dtype=None, **kwargs):
        super().__init__(width, heads, mechanism, *args, device=device, dtype=dtype, **kwargs)
        self.dconv = nn.Conv2d(
            heads, heads, (9, 1), padding=(4, 0), groups=heads, bias=False, device=device, dtype=dtype
        )

    def with_local(self, y: Tensor, operands: Operands) -> Tensor:
        return normalize(y, dim=-1) + self.dconv(operands.value)


class GatedAttention(TokenAttention):
    """RALA's and MALA's surroundings as released: rotation of the grid, LePE 5×5 on v, then times φ(x).

    The papers do not say what surrounds the operator in DeiT and Swin, and that code is not released.

    Args:
        modulation, lepe, rope: as in Attention2d.

    Raises:
        ValueError: for an unknown modulation, or a head width that RoPE cannot turn.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        *args,
        modulation: str = "linear",
        lepe: bool = True,
        rope: bool = True,
        device=None,
        dtype=None,
        **kwargs,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(width, heads, mechanism, *args, **kwargs, **dd)
        projected, phi = known("modulation", modulation, MODULATIONS)
        if rope and width // heads % 4:
            raise ValueError(
                f"the head width is {width // heads}, expected a multiple of 4 for RoPE: change `heads` or `rope`"
            )
        self.rope = rope
        self.lepe = DepthwiseConv(width, (5, 5), **dd) if lepe else None
        self.modulation = nn.Linear(width, width, **dd) if projected else None
        self.modulate = phi() if phi is not None else None
        for layer in (self.lepe, self.modulation):
            if layer is not None:
                trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        if not self.rope:
            return None
        table = rotary_2d(grid, x.shape[-1] // self.heads, dtype=x.dtype, device=x.device)
        return behind_prefix(table, self.num_prefix)

    def with_local(self, y: Tensor, operands: Operands) -> Tensor:
        return y if self.lepe is None else y + convolved(self.lepe, operands)

    def gated(self, y: Tensor, operands: Operands) -> Tensor:
        if self.modulate is None:
            return y
        gate = self.modulate(operands.x if self.modulation is None else self.modulation(operands.x))
        return y * gate.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)

    def input_layers(self) -> list[nn.Module]:
        if self.modulation is not None:
            return [self.qkv, self.modulation]
        return [self.qkv] if self.modulate is None else []

"""Attention over tokens in place of timm's `Attention`: qkv and proj stay, the part between them is replaced."""

from collections.abc import Callable, Sequence
from math import pi
from typing import Annotated, Any

import torch
from timm.layers import get_device_dtype, register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.nn.functional import normalize

from linvit.errors import SettingError, refuse
from linvit.layers.attention import MODULATIONS
from linvit.layers.checks import Device, Dtype, Rate, TensorOptions, check_turns
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.grid import CurrentGrid, ImagePatches, Places, after_prefix, timms_rotary, whole
from linvit.layers.operator import LEARNED, AttentionLayer, in_heads, merged
from linvit.ops import Rotary, rotary_2d
from linvit.ranges import Count, IsA, OneOf, lookup


@register_notrace_module
class TokenAttention(AttentionLayer):
    """proj(operator(qkv(x))), for mechanisms that need nothing around their operator; one opaque step for tracers.

    Subclasses change the inputs of the operator (`query_key_value`, `rotary`, `feature_map`), add a local term
    (`local_layer`, `with_local`), a gate (`gated`) or a second branch (`projected`), and create the layers for these
    (`add_layers`).

    Args:
        width, heads, mechanism, operator_size: as in AttentionLayer.
        grid: (height, width) in tokens of the position tables, which are interpolated for other sizes.
        num_prefix: tokens before the grid, such as a class token; local terms and rotations skip them.
        source: the grid of the latest images, used if forward gets none.
        qkv_bias, proj_bias, proj_drop: as in timm.
        blocks, block_sides: see Operator.
        axes: feature_map, weighting or normalizer in place of the mechanism's own, see Operator.

    Attributes:
        q_norm, k_norm, norm, sigmoid_gate: layers that a swapped network keeps: norms of the queries and keys of each
            head, a norm of the output of all heads, and a layer whose sigmoid the output is multiplied by.
        half_table: whether a rotation passed to forward repeats its angles after half of the channels, instead of
            giving each to two neighbours.
    """

    shares = (1.0, 0.0)  # of what a token reads and of its own value, see Operator
    mixes_sizes = True  # whether a batch may have images of different sizes
    stride = 1  # of the operator: it has the tokens of a grid with sides that are this much shorter
    rotates = True  # whether queries and keys can be rotated: their channels are those of the heads
    local_layer: str | None = None  # the convolution of the values, of all heads, that is added to what a token reads
    starts_at_zero: tuple[str, ...] = ()  # beginnings of the names of parameters with which the layer changes nothing
    half_table = False

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        source: Annotated[CurrentGrid, IsA(CurrentGrid)] | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: Rate = 0.0,
        operator_size: tuple[int, int] | None = None,
        blocks: tuple[Count, Count] | None = None,
        block_sides: tuple[Count, Count] | None = None,
        device: Device = None,
        dtype: Dtype = None,
        **axes: Any,
    ) -> None:
        dd: TensorOptions = {"device": device, "dtype": dtype}
        size = operator_size or self.size_of_operator(width, heads)
        cut: dict[str, Any] = {"blocks": blocks, "block_sides": block_sides, "prefix": num_prefix > 0}
        super().__init__(width, heads, mechanism, size, **cut, **axes, **dd)
        self.operator.shares = self.shares
        self.grid, self.num_prefix, self.source = (grid[0], grid[1]), num_prefix, source
        self.last_grid = CurrentGrid()
        self.first_row = 0  # of the grid, while the network reads only some of the rows
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias, **dd)
        self.proj = nn.Linear(width, width, bias=proj_bias, **dd)
        self.proj_drop: nn.Module = nn.Dropout(proj_drop)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        self.sigmoid_gate: nn.Module | None = None
        self.add_layers(width, dd)

    @staticmethod
    def size_of_operator(width: int, heads: int) -> tuple[int, int] | None:
        """Heads and channels per head of the operator; None for those of the layer."""
        return None

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        """Creates the layers around the operator of a mechanism without options of its own; none here."""

    def reset_to_operator(self) -> None:
        """Initializes the layers around the operator so that they change nothing: local terms 0, the gate 1."""
        for name, parameter in self.named_parameters():
            if name.startswith(self.starts_at_zero):
                nn.init.zeros_(parameter)

    def forward(
        self,
        x: Tensor,
        grid: list[int] | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
    ) -> Tensor:
        """Tokens (batch, prefix + height × width, channels) to tokens of the same shape.

        Args:
            x: the prefix, then the tokens of the grid row by row.
            grid: height and width in tokens; None for those of the source.
            attn_mask, is_causal: part of timm's interface; only None and False. With patches of images of different
                sizes a mask is expected, the one that timm makes of their `patch_valid`; the patches are used instead.
            rope: timm's rotation of the tokens of the grid, sines and then cosines (…, height × width, 2 × head width);
                it replaces that of the mechanism.
        """
        patches = self.source.patches if self.source is not None and grid is None else None
        if is_causal or (attn_mask is not None and patches is None):
            raise ValueError("the attention got a mask, expected none: a swapped attention sees every token")
        if patches is None:
            places = Places(self.num_prefix, self.known_grid(x, grid))
        else:
            self._check_patches(x, patches)
            x, places = patches.packed(x), Places(self.num_prefix, patches.grid, patches)
        self.last_grid.note(places.grid, patches)
        query, key, value = self.query_key_value(x, places.grid)
        y = self.operator(
            query,
            key,
            value,
            self._rotation(x, places, rope),
            feature_map=self.feature_map(),
            cu_seqlens=None if patches is None else patches.cu_seqlens,
            grid=places.grid,
        )
        y = self.gated(self.with_local(y, value, x, places), x)
        x = self.proj_drop(self.projected(y, x, places))
        return x if patches is None else patches.padded(x)

    def scores(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The matrix that the operator multiplies the values by, (batch, heads, tokens, tokens), as forward reads x."""
        query, key, value = self.query_key_value(x, grid)
        rotary = self._rotation(x, Places(self.num_prefix, grid), None)
        return self.operator.scores(query, key, value, rotary, feature_map=self.feature_map(), grid=grid)

    def _check_patches(self, x: Tensor, patches: ImagePatches) -> None:
        refuse(
            (not self.mixes_sizes or self.operator.options is None or self.operator.blocks is not None)
            and f"the network got patches with coordinates, but the mechanism {self.operator.mechanism!r} needs one "
            "grid for the whole batch: give it images of one size, or choose 'linear', 'rala' or 'mala' without blocks",
            x.shape[:2] != patches.valid.shape
            and f"{type(self).__name__} got {x.shape[0]} × {x.shape[1]} tokens, expected those of the latest patches, "
            f"{' × '.join(map(str, patches.valid.shape))}: run the backward pass of one batch before the next batch",
        )

    def _rotation(self, x: Tensor, places: Places, rope: Tensor | None) -> Rotary | None:
        """The rotation of all tokens: timm's, which replaces that of the mechanism."""
        if rope is None:
            rotary = self.rotary(x, places.grid)
            return rotary if rotary is None or places.patches is None else places.patches.of_grid(rotary)
        rotary = after_prefix(timms_rotary(rope, self.half_table), self.num_prefix)
        return rotary if places.patches is None else places.patches.of_tokens(rotary)

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        """The output of the operator plus the local term, if there is one, (batch, heads, tokens, width).

        value: as the operator reads it. x: the input of the layer. places: of the tokens.
        """
        local: nn.Module | None = getattr(self, self.local_layer) if self.local_layer else None
        return y if local is None else y + places.convolved(local, value)

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        """The rotation of the prefix and the tokens of a grid; none here."""
        return None

    def feature_map(self) -> Callable[[Tensor], Tensor] | None:
        """A feature map with parameters of this layer, which replaces the mechanism's; none here."""
        return None

    def input_layers(self) -> list[nn.Module]:
        """Every layer that reads the input; none if the input is also used directly."""
        return [self.qkv, *([] if self.sigmoid_gate is None else [self.sigmoid_gate])]

    def gated(self, y: Tensor, x: Tensor) -> Tensor:
        """That output normed and times the gate, if the layer has them. x: the input of the layer."""
        if self.sigmoid_gate is None and isinstance(self.norm, nn.Identity):
            return y
        out: Tensor = self.norm(merged(y))
        if self.sigmoid_gate is not None:
            out = out * self.sigmoid_gate(x).sigmoid()
        return in_heads(out, y.shape[1])

    def projected(self, y: Tensor, x: Tensor, places: Places) -> Tensor:
        """The output of the layer, (batch, tokens, channels), from that of the gate; x, places: as in with_local."""
        out: Tensor = self.proj(merged(y))
        return out

    def output_layers(self) -> list[nn.Module]:
        """Every layer whose output is part of the sum that the layer returns."""
        return [self.proj]

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        """Query, key and value, each (batch, heads, tokens, width)."""
        qkv: Tensor = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(query), self.k_norm(key), value

    def known_grid(self, x: Tensor, grid: Sequence[int] | None) -> tuple[int, int]:
        """Height and width in tokens, without the prefix."""
        if grid is None:
            grid = None if self.source is None else self.source.of(x.shape[1] - self.num_prefix)
        height, width = self.grid if grid is None else grid
        if x.shape[1] != self.num_prefix + height * width:
            raise ValueError(
                f"{type(self).__name__} got {x.shape[1]} tokens, expected {self.num_prefix} + {height} × {width}: "
                "dropped or pruned patches have no grid, keep them all"
            )
        return whole(height, width)


class Hydra(TokenAttention):
    """Hydra attention (Bolya et al., 2022): as many heads as channels, so that one vector gates every token.

    The paper replaces only the last layers of a ViT; here any layer can have it, as in FLatten's comparison.
    """

    rotates = False

    @staticmethod
    def size_of_operator(width: int, heads: int) -> tuple[int, int]:
        return width, 1

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        return [merged(tokens).mT.unsqueeze(-1) for tokens in super().query_key_value(x, grid)]


class LinearAngular(TokenAttention):
    """Linear angular attention (Castling-ViT, CVPR 2023) as in inference: y/|y| + a convolution of v over 9 tokens.

    y = v/2 + q̂ Σ_j k̂_j ⊗ v_j / π. The paper's first-order term would be Σ_j v_j / 2; the code, which is followed, has
    the token's own value instead. The masked softmax branch, which exists only in training, is left out.
    """

    mixes_sizes = False
    shares = (1 / pi, 0.5)
    starts_at_zero = ("dconv",)

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        self.dconv = nn.Conv2d(self.heads, self.heads, (9, 1), padding=(4, 0), groups=self.heads, bias=False, **dd)

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        return normalize(y, dim=-1) + self.dconv(value)


class GatedAttention(TokenAttention):
    """The layer that RALA and MALA use, as released: rotation by the grid, LePE 5×5 of v, gate φ(x).

    The papers do not describe the layers around the operator in DeiT and Swin, and that code is not released.

    Args:
        modulation, lepe, rope: as in Attention2d; rope also "learned": all angles times a learned factor, initially 0.
    """

    local_layer = "lepe"
    starts_at_zero = ("lepe",)
    turned = 1  # channels of the rotation over those of a head

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        modulation: str = "linear",
        lepe: bool = True,
        rope: bool | Annotated[str, OneOf((LEARNED,))] = True,
        **options: Any,
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, **options)
        dd = get_device_dtype(self.qkv)
        projected, phi = lookup("modulation", modulation, MODULATIONS)
        if rope:
            check_turns(width // heads, axes=2)
        self.rope = bool(rope)
        self.turn = nn.Parameter(torch.empty((), **dd)) if rope == LEARNED else None
        self.lepe = DepthwiseConv(width, (5, 5), **dd) if lepe else None
        self.modulation = nn.Linear(width, width, **dd) if projected else None
        self.modulate = phi() if phi is not None else None
        for layer in (self.lepe, self.modulation):
            if layer is not None:
                assert layer.bias is not None
                trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        GatedAttention.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Starts a learned rotation at 0."""
        if self.turn is not None:
            nn.init.zeros_(self.turn)

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary | None:
        if not self.rope:
            return None
        place: dict[str, Any] = {"first_row": self.first_row, "dtype": x.dtype, "device": x.device}
        table = rotary_2d(grid, self.turned * x.shape[-1] // self.heads, factor=self.turn, **place)
        return after_prefix(table, self.num_prefix)

    def reset_to_operator(self) -> None:
        """Local term 0, gate 1, and a learned rotation by 0. Raises ValueError for a gate that cannot be 1."""
        if self.modulate is not None and not (self.modulation and isinstance(self.modulate, nn.Identity)):
            raise SettingError("the gate cannot start as 1 with this `modulation`: choose 'linear' or 'none'")
        super().reset_to_operator()
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
            nn.init.ones_(self.modulation.bias)

    def gated(self, y: Tensor, x: Tensor) -> Tensor:
        if self.modulate is not None:
            gate: Tensor = self.modulate(x if self.modulation is None else self.modulation(x))
            y = y * in_heads(gate, y.shape[1])
        return super().gated(y, x)

    def input_layers(self) -> list[nn.Module]:
        if self.modulation is not None:
            return [*super().input_layers(), self.modulation]
        return super().input_layers() if self.modulate is None else []

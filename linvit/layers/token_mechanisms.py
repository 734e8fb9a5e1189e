"""Published mechanisms that add parameters around the operator: FLatten, InLine, MLLA, Agent, PolaFormer, MHLA."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import get_device_dtype, trunc_normal_
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, conv2d, interpolate, pad, softplus

from linvit.errors import SettingError
from linvit.formulas.feature_map import focused
from linvit.layers.checks import TensorOptions
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.grid import Places, rotary_over_heads
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.operator import in_heads, merged
from linvit.layers.recent_mechanisms import (
    InnerStepAttention,
    MHLAAttention,
    NormAwareAttention,
    RecNeXtAttention,
    ScaledPolarAttention,
)
from linvit.layers.token_attention import GatedAttention, Hydra, LinearAngular, TokenAttention
from linvit.ops import Rotary
from linvit.ranges import Count


class FocusedAttention(TokenAttention):
    """Focused linear attention (FLatten, ICCV 2023), power 3.

    A table of positions is added to the keys, κ has a learned temperature, and a 5×5 depthwise convolution of v, shared
    by all heads, is added to the output. FLatten's DeiT is not released: here the class token has no position.
    """

    mixes_sizes = False
    starts_at_zero = ("positional_encoding", "dwc")

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        head_width = width // self.heads
        self.scale = nn.Parameter(torch.empty(1, 1, width, **dd))
        self.positional_encoding = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1], width, **dd))
        self.dwc = nn.Conv2d(head_width, head_width, 5, padding=2, groups=head_width, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the temperature to softplus(0) and the positions to random values."""
        nn.init.zeros_(self.scale)
        trunc_normal_(self.positional_encoding, std=0.02)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(x, grid)
        positions = _positions(self.positional_encoding, self.grid, grid, self.num_prefix)
        return query, key + in_heads(positions, self.heads), value

    def feature_map(self) -> Callable[[Tensor], Tensor] | None:
        if (self.operator.options or {}).get("feature_map") != "focused":
            return None
        return partial(focused, temperature=softplus(self.scale).unflatten(-1, (self.heads, -1)).transpose(1, 2))

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        return y + places.convolved(_by_head(self.dwc, self.heads), value)


class InLineAttention(TokenAttention):
    """InLine attention (NeurIPS 2024): subtraction instead of division, plus a 3×3 convolution of v.

    The weights of the convolution are predicted for each image from the mean of its tokens, class token included.
    """

    mixes_sizes = False
    starts_at_zero = ("residual.2",)

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        self.residual = nn.Sequential(
            nn.Conv1d(width, width, 1, groups=self.heads, **dd),
            nn.GELU(),
            nn.Conv1d(width, 9 * width, 1, groups=self.heads, **dd),
        )

    def input_layers(self) -> list[nn.Module]:
        return [*super().input_layers(), self.residual[0]]

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        batch, _, channels = x.shape
        weight = self.residual(x.mean(1).unsqueeze(-1)).reshape(batch * channels, 1, 3, 3)

        def convolution(values: Tensor) -> Tensor:
            every_image = values.reshape(1, batch * channels, *places.grid)
            return conv2d(every_image, weight, padding=1, groups=batch * channels).reshape_as(values)

        return y + places.convolved(convolution, value)


class MLLAAttention(TokenAttention):
    """MLLA's attention (NeurIPS 2024): vanilla linear attention with a rotated numerator, plus LePE 3×3 of v.

    The rotation runs over all channels before they are split into heads. MLLA itself uses v = x without a projection;
    in DeiT and Swin both projections are kept. MLLA's other convolutions and its gate belong to its block, not to the
    attention.
    """

    local_layer = "lepe"
    starts_at_zero = ("lepe",)

    def add_layers(self, width: int, dd: TensorOptions) -> None:
        self.lepe = DepthwiseConv(width, (3, 3), **dd)

    def rotary(self, x: Tensor, grid: tuple[int, int]) -> Rotary:
        return rotary_over_heads(x, grid, self.heads, self.num_prefix, self.first_row)


class AgentAttention(TokenAttention):
    """Agent attention (ECCV 2024): the agents, pooled queries, attend to all tokens; all tokens attend to the agents.

    Both are softmax attention with a learned bias. For the operator this is linear attention whose width is the number
    of agents: a query's features are its scores over the agents, a key's features the agents' scores over that key.

    Args:
        agents: (height, width) of the grid of agents.
    """

    mixes_sizes = False
    rotates = False
    local_layer = "dwc"
    starts_at_zero = ("dwc",)
    BIAS = 7
    an_bias: nn.Parameter
    na_bias: nn.Parameter
    ah_bias: nn.Parameter
    aw_bias: nn.Parameter
    ha_bias: nn.Parameter
    wa_bias: nn.Parameter
    ac_bias: nn.Parameter
    ca_bias: nn.Parameter
    fixed = ("operator_size",)

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        agents: tuple[Count, Count] = (7, 7),
        **options: Any,
    ) -> None:
        number = agents[0] * agents[1]
        options["operator_size"] = heads, number
        super().__init__(width, heads, mechanism, grid, num_prefix, **options)
        self.agents = (agents[0], agents[1])
        shapes: dict[str, tuple[int, ...]] = {
            "an_bias": (heads, number, self.BIAS, self.BIAS),
            "na_bias": (heads, number, self.BIAS, self.BIAS),
            "ah_bias": (1, heads, number, grid[0], 1),
            "aw_bias": (1, heads, number, 1, grid[1]),
            "ha_bias": (1, heads, grid[0], 1, number),
            "wa_bias": (1, heads, 1, grid[1], number),
        }
        if self.num_prefix:
            shapes["ac_bias"] = (1, heads, number, self.num_prefix)
            shapes["ca_bias"] = (1, heads, self.num_prefix, number)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(self.qkv.weight.new_empty(shape)))
        self.dwc = DepthwiseConv(width, (3, 3), **get_device_dtype(self.qkv))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the biases to random values."""
        for parameter in self.parameters(recurse=False):
            trunc_normal_(parameter, std=0.02)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(x, grid)
        as_map = merged(query)[:, self.num_prefix :].mT.unflatten(-1, grid)
        pooled = adaptive_avg_pool2d(as_map, self.agents).flatten(2).unflatten(1, (self.heads, -1)).mT
        scale = query.shape[-1] ** -0.5
        seen_by_agents = (scale * pooled @ key.mT + self._agent_bias(grid)).softmax(-1)
        sees_agents = (scale * query @ pooled.mT + self._token_bias(grid)).softmax(-1)
        return sees_agents, seen_by_agents.mT, value

    def _agent_bias(self, grid: tuple[int, int]) -> Tensor:
        """(1, heads, agents, tokens)."""
        rows, columns = _stretched(self.ah_bias, 3, grid[0]), _stretched(self.aw_bias, 4, grid[1])
        bias = (interpolate(self.an_bias, grid, mode="bilinear") + rows + columns).flatten(-2)
        return torch.cat((self.ac_bias, bias), dim=-1) if self.num_prefix else bias

    def _token_bias(self, grid: tuple[int, int]) -> Tensor:
        """(1, heads, tokens, agents)."""
        rows, columns = _stretched(self.ha_bias, 2, grid[0]), _stretched(self.wa_bias, 3, grid[1])
        block = interpolate(self.na_bias, grid, mode="bilinear").movedim(1, -1)
        bias = (block + rows + columns).flatten(2, 3)
        return torch.cat((self.ca_bias, bias), dim=-2) if self.num_prefix else bias


class PolarAttention(GatedAttention):
    """Polarity-aware linear attention (PolaFormer, ICLR 2025, arXiv 2501.15061).

    With x⁺ = max(x, 0)^p and x⁻ = max(-x, 0)^p, one half of a head's values is multiplied by the scores of equal signs,
    q⁺·k⁺ + q⁻·k⁻, the other half with those of opposite signs, q⁺·k⁻ + q⁻·k⁺, each divided by the sum of its row. A 5×5
    depthwise convolution of v, one for all heads, is added, then the gate, a projection of x (the paper's Gˢ and Gᵒ
    side by side), is applied. For the operator every head becomes two, with queries [q, -q] and keys [k, -k] and
    [-k, k].

    What the paper leaves open is as in its port to flash-bidirectional-linear-attention: a table of positions is added
    to the keys, queries and keys are divided by a learned temperature for each channel, the power is
    p = 1 + 4·sigmoid(w) with w initially 0, for both signs, and the gate comes after the convolution. The port has no
    class token: here it has no position.

    Args:
        modulation, lepe: as in GatedAttention.
        positions: add the table of positions, without which images of a batch may have different sizes.
    """

    rotates = False
    starts_at_zero = ("dwc",)
    fixed = ("rope",)
    ALPHA = 4.0

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        grid: tuple[int, int],
        num_prefix: int = 0,
        lepe: bool = True,
        positions: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(width, heads, mechanism, grid, num_prefix, rope=False, lepe=False, **options)
        head_width = width // heads
        if head_width % 2:
            raise SettingError(f"the head width is {head_width}, expected an even number: change `heads`")
        dd = get_device_dtype(self.qkv)
        table = torch.empty(1, grid[0] * grid[1], width, **dd) if positions else None
        self.positional_encoding = None if table is None else nn.Parameter(table)
        self.mixes_sizes = not positions
        self.scale = nn.Parameter(torch.empty(1, 1, width, **dd))
        self.power = nn.Parameter(torch.empty(width, **dd))
        self.dwc = DepthwiseConv(head_width, (5, 5), **dd) if lepe else None
        self.reset_parameters()

    @staticmethod
    def size_of_operator(width: int, heads: int) -> tuple[int, int]:
        return 2 * heads, 2 * width // heads

    def reset_parameters(self) -> None:
        """Sets every power to 1 + α/2, the temperature to softplus(0) and the positions to 0."""
        super().reset_parameters()
        for parameter in (self.power, self.scale, self.positional_encoding):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def query_key_value(self, x: Tensor, grid: tuple[int, int]) -> Sequence[Tensor]:
        query, key, value = super().query_key_value(x, grid)
        if self.positional_encoding is not None:
            key = key + in_heads(_positions(self.positional_encoding, self.grid, grid, self.num_prefix), self.heads)
        temperature = in_heads(softplus(self.scale), self.heads)
        query, key = query / temperature, key / temperature
        signed = torch.cat((key, -key), dim=-1)
        halves = value.unflatten(-1, (2, -1)).movedim(-2, 2)
        queries = torch.cat((query, -query), dim=-1).repeat_interleave(2, dim=1)
        return queries, torch.stack((signed, -signed), dim=2).flatten(1, 2), halves.flatten(1, 2)

    def with_local(self, y: Tensor, value: Tensor, x: Tensor, places: Places) -> Tensor:
        return y if self.dwc is None else y + places.convolved(_by_head(self.dwc, self.heads), value)

    def feature_map(self) -> Callable[[Tensor], Tensor] | None:
        if (self.operator.options or {}).get("feature_map") != "relu":
            return None
        power = (1 + self.ALPHA * self.power.sigmoid()).unflatten(0, (self.heads, 1, -1))

        def powers(signed: Tensor) -> Tensor:
            # The four copies of a channel differ in their signs only, so one power serves all of them.
            sizes = signed[..., ::2, :, : power.shape[-1]].abs() ** power
            both = torch.cat((sizes, sizes), dim=-1).unsqueeze(-3)
            out: Tensor = both * (signed > 0).unflatten(-3, (-1, 2))
            return out.flatten(-4, -3)

        return powers


def _by_head(convolution: nn.Module, heads: int) -> Callable[[Tensor], Tensor]:
    """A convolution of the channels of one head as one of the channels of all heads."""

    def convolved(x: Tensor) -> Tensor:
        maps: Tensor = convolution(x.unflatten(1, (heads, -1)).flatten(0, 1))
        return maps.unflatten(0, (-1, heads)).flatten(1, 2)

    return convolved


def _positions(table: Tensor, made_for: tuple[int, int], grid: tuple[int, int], num_prefix: int) -> Tensor:
    """A table (1, tokens, channels) interpolated for another grid, with zeros for the prefix."""
    if grid != made_for:
        table = interpolate(table.mT.unflatten(-1, made_for), grid, mode="bicubic").flatten(2).mT
    return pad(table, (0, 0, num_prefix, 0))


def _stretched(table: Tensor, dim: int, length: int) -> Tensor:
    """The table with `length` entries along one dimension, interpolated linearly."""
    if table.shape[dim] == length:
        return table
    last = table.movedim(dim, -1)
    stretched = interpolate(last.reshape(1, -1, last.shape[-1]), length, mode="linear")
    return stretched.reshape(*last.shape[:-1], length).movedim(-1, dim)


TOKEN_LAYERS: dict[str, type[TokenAttention]] = {
    **dict.fromkeys(MECHANISMS, TokenAttention),
    "hydra": Hydra,
    "linear_angular": LinearAngular,
    "focused": FocusedAttention,
    "inline": InLineAttention,
    "mlla": MLLAAttention,
    "agent": AgentAttention,
    "polaformer": PolarAttention,
    "mhla": MHLAAttention,
    "polaformer_pp": ScaledPolarAttention,
    "nala": NormAwareAttention,
    "recnext": RecNeXtAttention,
    "vittt": InnerStepAttention,
    **dict.fromkeys(("rala", "mala", "rala_mala"), GatedAttention),
}
"""The attention layer that `swap_attention` puts into a network for each mechanism."""

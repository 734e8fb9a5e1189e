"""The block of NaLaFormer: attention of a map with a norm and a SiLU gate, and a convolution before each half."""

from typing import Any

import torch
from timm.layers import LayerNorm2d, register_notrace_module
from torch import Tensor

from linvit.layers.attention import Attention2d, Operands
from linvit.layers.block import AttentionBlock
from linvit.layers.convolutions import DepthwiseConv, convolved
from linvit.ops import Rotary

SIGNED = "nala"


@register_notrace_module
class NormAwareAttention2d(Attention2d):
    """Attention2d as in NaLaFormer's released code: all heads are normed together before the gate.

    With the mechanism "nala" the operator's heads have queries [q, -q] and keys [k, -k], and the rotation turns both
    halves alike, as in `linvit.layers.recent_mechanisms.NormAwareAttention`.

    Args:
        width, heads, mechanism, modulation, options: as in Attention2d; the mechanism also "nala".
    """

    def __init__(self, width: int, heads: int, mechanism: str, modulation: str = "silu", **options: Any) -> None:
        if mechanism == SIGNED:  # which stands in no other map
            options |= {"place": None, "operator_size": (heads, 2 * width // heads)}
        super().__init__(width, heads, mechanism, modulation, **options)
        self.operator.place = "maps"
        self.ln = LayerNorm2d(width, eps=1e-5, device=self.proj.weight.device, dtype=self.proj.weight.dtype)

    def operands(self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None) -> Operands:
        if self.operator.mechanism != SIGNED:
            return query, key, value, rotary
        query, key = (torch.cat((x, -x), dim=-1) for x in (query, key))
        if rotary is not None:
            rotary = Rotary(*(torch.cat((table, table), dim=-1) for table in rotary))
        return query, key, value, rotary

    def at_once(self, y: Tensor, value: Tensor, gate: Tensor) -> None:
        """None: the norm stands between the local term and the gate."""

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return super().gated(self.ln(y), gate)


class NormAwareBlock(AttentionBlock):
    """AttentionBlock with NormAwareAttention2d, and a second 3×3 depthwise convolution before its feed-forward.

    Args:
        width, heads, mechanism, attention, options: as in AttentionBlock.
        cpe: start both halves of the block with such a convolution.
    """

    attention_class = NormAwareAttention2d

    def __init__(self, width: int, heads: int, mechanism: str, cpe: bool = True, **options: Any) -> None:
        super().__init__(width, heads, mechanism, cpe=cpe, **options)
        dd: dict[str, Any] = {"device": self.gamma_1.device, "dtype": self.gamma_1.dtype}
        self.cpe2 = DepthwiseConv(width, (3, 3), **dd) if cpe else None

    def with_feed_forward(self, x: Tensor) -> Tensor:
        if self.cpe2 is not None:
            x = convolved(self.cpe2, x, residual=True)
        return super().with_feed_forward(x)

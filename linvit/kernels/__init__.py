"""GPU kernels (Triton): the formula of `linvit.ops` on raw queries, keys and values, fused."""

from linvit.kernels.linear_attention import linear_attention as linear_attention
from linvit.kernels.support import obstacle as obstacle

"""The formula of `linvit.ops` on raw queries, keys and values, fused: for GPUs (Triton), and for CPUs (C++, cpu)."""

from linvit.kernels import cpu as cpu
from linvit.kernels.linear_attention import linear_attention as linear_attention
from linvit.kernels.support import obstacle as obstacle

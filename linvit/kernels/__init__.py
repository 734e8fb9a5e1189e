"""Fused kernels of `linvit.ops.linear_attention`: for GPUs in Triton, for CPUs in C++ (`linvit.kernels.cpu`)."""

from linvit.kernels import cpu as cpu
from linvit.kernels.linear_attention import linear_attention as linear_attention
from linvit.kernels.support import obstacle as obstacle

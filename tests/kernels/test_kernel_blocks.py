"""Attention by blocks on the Triton kernels against the plain form in float64."""

import pytest
import torch

from linvit.layers.grid import after_prefix
from linvit.ops import linear_attention, rotary_2d

CASES = {
    "MHLA": ((4, 6), (2, 3), 0, 16, torch.float32, {"feature_map": "relu_eps"}, False),
    "MALA, ragged blocks": ((7, 5), (3, 2), 1, 20, torch.float32, {"normalizer": "magnitude"}, True),
    "a function in bfloat16": (
        (5, 5),
        (2, 2),
        0,
        16,
        torch.bfloat16,
        {"feature_map": lambda x: x.square() + 0.1},
        True,
    ),
}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_as_good_as_torchs(name):
    grid, blocks, prefix, width, dtype, rule, rotated = CASES[name]
    tokens, number = prefix + grid[0] * grid[1], blocks[0] * blocks[1] + (prefix > 0)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, tokens, width, generator=generator).to(dtype) for _ in range(4)]
    inputs, mixing = tensors[:3], torch.rand(3, number, number, generator=generator)
    options = {"blocks": blocks, "grid": grid, **rule}
    if rotated:
        options["rotary"] = after_prefix(rotary_2d(grid, width), prefix)
        options["key_mask"] = torch.arange(tokens).expand(2, -1) % 5 > 0

    def output_and_gradients(backend, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        leaves.append(mixing.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        out = linear_attention(*leaves[:3], mixing=leaves[3], backend=backend, **options)
        return [out.detach(), *torch.autograd.grad((out * tensors[3].to(dtype)).sum(), leaves)]

    exact = output_and_gradients("torch", torch.float64)
    pairs = zip(exact, output_and_gradients("torch", dtype), output_and_gradients("triton", dtype), strict=True)
    for right, by_torch, by_kernel in pairs:
        assert by_kernel.dtype == by_torch.dtype
        allowed = max(3 * (by_torch - right).norm().item(), ROUNDING[dtype] * right.norm().item())
        assert (by_kernel - right).norm().item() <= allowed


def test_what_has_no_kernel_says_so():
    x = torch.randn(1, 2, 6, 16)
    where = {"mixing": torch.rand(6, 6), "blocks": (2, 3), "grid": (2, 3), "backend": "triton"}
    with pytest.raises(
        ValueError, match="blocks have a kernel for bidirectional attention of a batch with equal weights"
    ):
        linear_attention(x, x, x, weighting="query_mean", **where)

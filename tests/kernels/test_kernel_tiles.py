"""Parts that several kernels share."""

import pytest
import torch
import triton
import triton.language as tl

from linvit.kernels.tiles import factor


@triton.jit
def factors(x, out, NUMBER: tl.constexpr, PRECISION: tl.constexpr):
    place = tl.arange(0, NUMBER)
    tl.store(out + place, factor(tl.load(x + place), tl.float32, PRECISION))


@pytest.mark.parametrize(("precision", "bits"), [("tf32", 10), ("ieee", 23), ("tf32x3", 23), ("bf16", 7)])
def test_factors_are_rounded_to_what_tensor_cores_keep(precision, bits):
    x = torch.cat([torch.randn(1021), torch.tensor([0.0, -0.0, float("inf")])]) * 1000
    if torch.cuda.is_available():
        x = x.cuda()
    out = torch.empty_like(x)
    factors[(1,)](x, out, NUMBER=1024, PRECISION=precision)
    mantissa, exponent = torch.frexp(x.double())
    expected = torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)
    assert torch.equal(out.double(), expected)

"""The functions of the kernel against their matrix of scores in float64; run where the kernel has been built."""

from pathlib import Path

import pytest
import torch

from kernels import get_local_kernel

FOLDER = Path(__file__).parents[1] / "build"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(scope="module")
def linvit():
    return get_local_kernel(FOLDER)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rala", "mala"])
def test_output_and_gradient_are_those_of_the_scores(linvit, name, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 77, 32, device=device, requires_grad=True) for _ in range(3))
    options = {"rala": {"weighting": "query_mean"}, "mala": {"normalizer": "magnitude"}}[name]
    out = linvit.linear_attention(q, k, v, **options, backend="triton" if device == "cuda" else "torch")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = linvit.attention_scores(*exact[:2], **options) @ exact[2]
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-3, rtol=1e-3)

import subprocess
import sys

import pytest
import torch

from linvit.kernels import support
from linvit.ops import linear_attention, rotary_1d


def draw(**options):
    return torch.randn(3, 1, 2, 6, 8, **options)


def refused(match, *tensors, **options):
    with pytest.raises(ValueError, match=match):
        linear_attention(*(tensors or draw()), backend="triton", **options)


def test_auto_on_the_cpu_is_torch():
    query, key, value = draw()
    plain = linear_attention(query, key, value, weighting="query_mean", backend="torch")
    assert torch.equal(linear_attention(query, key, value, weighting="query_mean"), plain)


def test_torch_and_auto_on_the_cpu_never_load_the_kernels():
    code = (
        "import sys, torch, linvit.ops as ops; x = torch.ones(1, 1, 3, 4); ops.linear_attention(x, x, x);"
        "ops.linear_attention(x, x, x, backend='torch'); assert 'linvit.kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_kernels_cannot_do_is_said():
    refused("the queries' feature_map is a builtin_function_or_method", feature_map=torch.sigmoid)
    refused(
        "the keys' feature_map is 'softmax_tokens'.*elu1, relu, exp, identity", feature_map=("elu1", "softmax_tokens")
    )
    refused("weighting is a Tensor.*uniform, query_mean", weighting=torch.ones(6))
    refused("normalizer='sum' has a kernel for uniform", weighting="query_mean", normalizer="sum")
    refused("the tensors are torch.float64", *draw(dtype=torch.float64))
    refused("head widths are 130 and 130.*support up to 128", *torch.randn(3, 1, 1, 4, 130))
    rotary = rotary_1d(6, 8)
    rotary.cos.requires_grad_()
    refused("rotary tables", rotary=rotary)
    refused("a tensor is empty", *torch.randn(3, 0, 2, 6, 8))


def test_without_triton_the_reason_is_that(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    refused("Triton is not installed")


@pytest.mark.skipif(support.find_spec("triton") is None, reason="Triton is not installed")
def test_on_the_cpu_the_reason_is_that():
    refused("the tensors are on cpu, and the kernels need CUDA tensors; use 'auto' or 'torch'")

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from linvit.kernels import record, softmax_attention, support
from linvit.ops import linear_attention, rotary_1d
from linvit.ops.backend import kernel_for, softmax_kernel_for


def draw(**options):
    return torch.randn(3, 1, 2, 6, 8, **options)


def refused(match, *tensors, **options):
    with pytest.raises(ValueError, match=match):
        linear_attention(*(tensors or draw()), backend="triton", **options)


def test_auto_on_the_cpu_is_torch():
    query, key, value = draw()
    plain = linear_attention(query, key, value, weighting="query_mean", backend="torch")
    assert torch.equal(linear_attention(query, key, value, weighting="query_mean"), plain)


def test_the_operator_needs_torch_alone_and_on_the_cpu_never_loads_the_kernels():
    code = """
        import sys
        for name in ("timm", "torchvision", "lightning", "sklearn", "matplotlib", "rich", "safetensors"):
            sys.modules[name] = None
        import torch, linvit.ops
        x = torch.ones(1, 1, 4, 8)
        linvit.ops.linear_attention(x, x, x)
        assert linvit.ops.rala(x, x, x, backend="torch").shape == x.shape
        assert "linvit.kernels" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_what_the_kernels_cannot_do_is_said():
    refused(r"the queries' feature_map: `cumsum` \(test_backend.py, line \d+\)", feature_map=lambda x: x.cumsum(2))
    refused("the keys' feature_map: 'softmax_tokens' combines tokens", feature_map=("elu1", "softmax_tokens"))
    refused("weighting is a Tensor.*uniform, query_mean", weighting=torch.ones(6), causal=True)
    refused("the normalizer uses the mass, which has a kernel for uniform", weighting="query_mean", normalizer="sum")
    refused("the tensors are torch.float64", *draw(dtype=torch.float64))
    refused("head widths are 130 and 130.*support up to 128", *torch.randn(3, 1, 1, 4, 130))
    rotary = rotary_1d(6, 8)
    rotary.cos.requires_grad_()
    refused("gradients of rotary tables", rotary=rotary, causal=True)
    refused("a tensor is empty", *torch.randn(3, 0, 2, 6, 8))


def test_without_triton_the_reason_is_that(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    refused("Triton is not installed")


@pytest.mark.skipif(support.find_spec("triton") is None, reason="Triton is not installed")
def test_on_the_cpu_the_reason_is_that():
    refused("the tensors are on cpu, and the kernels need CUDA tensors; use 'auto' or 'torch'")


@pytest.mark.skipif(support.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("capability", "limit", "dtype", "width", "causal", "reason"),
    [
        (
            (8, 6),
            101376,
            torch.float16,
            100,
            False,
            "bidirectional attention in torch.float16 at width 128 needs 147,456",
        ),
        ((8, 6), 101376, torch.float16, 64, True, None),
        (
            (7, 5),
            65536,
            torch.float32,
            32,
            True,
            "causal attention in torch.float32 at width 32 needs 66,048 bytes.*65,536",
        ),
        ((7, 5), 65536, torch.float16, 64, True, None),
        ((7, 5), 65536, torch.bfloat16, 16, False, "capability is 7.5, and the kernels need 8.0 for torch.bfloat16"),
        ((6, 1), 49152, torch.float32, 16, False, "capability is 6.1, and the kernels need 7.0 for torch.float32"),
    ],
)
def test_what_a_card_cannot_run_is_said(monkeypatch, capability, limit, dtype, width, causal, reason):
    properties = SimpleNamespace(shared_memory_per_block_optin=limit)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with FakeTensorMode():
        query, key, value = torch.empty(3, 1, 2, 6, width, dtype=dtype, device="cuda")
    if reason is None:
        assert support.obstacle(query, key, value, causal=causal) is None
        return
    refused(reason, query, key, value, causal=causal)
    with record.trusted(True):
        assert kernel_for("auto", query, key, value, causal=causal) is None


@pytest.mark.skipif(support.find_spec("triton") is None, reason="Triton is not installed")
def test_softmax_attention_has_a_kernel_for_few_keys_and_a_rotation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def reason(tokens=49, width=64, dtype=torch.bfloat16, rotated=True, turned=None, heads=(2, 2, 2)):
        with FakeTensorMode():
            tensors = [torch.empty(1, each, tokens, width, dtype=dtype, device="cuda") for each in heads]
            rotary = (torch.empty(turned or tokens, width // 2, device="cuda"),) * 2 if rotated else None
        with record.trusted(True):
            used = softmax_kernel_for(*tensors, rotary)
        with record.trusted(False):
            assert softmax_kernel_for(*tensors, rotary) is None
        obstacle = support.softmax_obstacle(*tensors, rotary=rotary)
        assert used is (softmax_attention if rotated and obstacle is None else None)
        return obstacle

    assert reason() is None
    assert reason(rotated=False) is None
    assert reason(256, 128, torch.float16) is None
    assert "up to 256 keys" in reason(257)
    assert "head widths up to 128" in reason(width=130)
    assert "softmax attention in torch.float32 has no kernel" in reason(dtype=torch.float32)
    assert "torch.float64" in reason(dtype=torch.float64)
    assert "rotary tables of shape" in reason(turned=48)
    assert "not empty" in reason(0)
    assert "needs tensors (batch, heads" in reason(heads=(2, 1, 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability is 7.5, and the kernels need 8.0 for softmax attention" in reason()

"""What only a GPU shows: tensor-core arithmetic in half precision, large shapes, memory, CUDA graphs.

Run with: pytest tests/kernels/test_gpu.py -m gpu
"""

from functools import partial

import pytest
import torch
from kernel_judge import judge

from linvit.bench.exactness import deviations_in_bfloat16, output_and_gradients, plain_softmax
from linvit.kernels import softmax_attention
from linvit.ops import linear_attention, rotary_1d, rotary_2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
RALA = {"weighting": "query_mean"}
MALA = {"normalizer": "magnitude"}
kernels = partial(linear_attention, backend="triton")
CAUSAL = {"normalizer": "magnitude", "causal": True}
OPTIONS = pytest.mark.parametrize("options", [RALA, MALA, CAUSAL], ids=["rala", "mala", "causal"])


def draw(tokens, width, value_width=None, batch=2, heads=4):
    sizes = (width, width, value_width or width)
    return [torch.randn(batch, tokens, heads, size, device="cuda").transpose(1, 2) for size in sizes]


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "width"), [((56, 56), 64), ((14, 9), 16), ((31, 33), 128), ((28, 28), 32)])
def test_against_the_twin(options, dtype, size, width):
    judge(draw(size[0] * size[1], width), dtype, rotary=rotary_2d(size, width, device="cuda"), **options)


@OPTIONS
@pytest.mark.parametrize(("tokens", "width"), [(3136, 64), (126, 16), (1023, 128), (784, 48)])
def test_bfloat16_stays_near_the_rounding_of_its_inputs(options, tokens, width):
    rotary = rotary_1d(tokens, width, device="cuda")
    for row in deviations_in_bfloat16(draw(tokens, width), rotary=rotary, **options):
        assert row.error <= row.allowed, row


@OPTIONS
def test_the_same_bits_every_time(options):
    tensors, grad = [x.bfloat16() for x in draw(3136, 64)], torch.randn(2, 4, 3136, 64, device="cuda")
    first, second = (output_and_gradients(kernels, tensors, grad, torch.bfloat16, **options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@OPTIONS
def test_memory_is_the_output_and_the_states(options):
    tensors = [x.bfloat16() for x in draw(12544, 64, batch=8, heads=8)]
    linear_attention(*tensors, backend="triton", **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = linear_attention(*tensors, backend="triton", **options)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 1.2 * out.numel() * out.element_size()


@OPTIONS
def test_in_a_cuda_graph(options):
    tensors = [x.bfloat16() for x in draw(784, 64)]
    expected = linear_attention(*tensors, backend="triton", **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_attention(*tensors, backend="triton", **options)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(49, 64), (196, 64), (256, 128), (126, 16), (20, 32)])
def test_softmax_attention(tokens, width, dtype, masked):
    mask = torch.rand(2, tokens, device="cuda") > 0.4 if masked else None
    options = {"rotary": rotary_1d(tokens, width, device="cuda"), "key_mask": mask}
    if dtype == torch.float16:
        judge(draw(tokens, width), dtype, kernel=softmax_attention, twin=plain_softmax, **options)
        return
    for row in deviations_in_bfloat16(draw(tokens, width), softmax_attention, plain_softmax, **options):
        assert row.error <= row.allowed, row


def test_softmax_attention_in_a_cuda_graph_gives_the_same_bits():
    tensors, rotary = [x.bfloat16() for x in draw(196, 64)], rotary_1d(196, 64, device="cuda")
    grad = torch.randn_like(tensors[2])
    expected = output_and_gradients(softmax_attention, tensors, grad, torch.bfloat16, rotary=rotary)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = output_and_gradients(softmax_attention, tensors, grad, torch.bfloat16, rotary=rotary)
    graph.replay()
    torch.cuda.synchronize()
    for actual, same in zip(results, expected, strict=True):
        assert torch.equal(actual, same)

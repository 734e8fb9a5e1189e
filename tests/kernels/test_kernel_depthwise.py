"""Depthwise convolutions and what surrounds them, against torch in float64."""

from functools import partial

import pytest
import timm
import torch
from tiers import slow
from torch import library
from torch.nn.functional import conv2d, gelu

from linvit import fuse, kernels
from linvit.bench.depthwise import STRIPS, WORKS, Work, deviations_of, kernel, operands, plain, results
from linvit.fusion.care import fused_block
from linvit.kernels import depthwise_launch
from linvit.kernels.support import depthwise_obstacle
from linvit.layers import AttentionBlock, CareBlock
from linvit.layers.attention import rotary_table
from linvit.layers.convolutions import DepthwiseConv, convolved
from linvit.ops import backend


def judge(work, shape, device, dtype=torch.float32):
    for row in deviations_of(work, operands(work, shape, device), dtype):
        assert row.error <= row.allowed, row


@pytest.mark.parametrize("name", ["LePE and gate", *slow("feed-forward", "position encoding", "interaction")])
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16, torch.float16)])
def test_what_networks_compute(device, name, dtype):
    judge(WORKS[name], (2, 20, 5, 3), device, dtype)


def test_half_precision(device):
    judge(WORKS["feed-forward"], (1, 20, 5, 3), device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("name", ["local groups", *slow("strips and local groups")])
def test_groups_of_several_sizes_in_one_launch(device, name, dtype):
    judge(WORKS[name], (1, 5, 5, 3), device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((3, 3),), ((5, 5),), ((7, 7),), ((1, 7),), ((5, 3),), ((1, 31),), STRIPS], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 3, 2), (1, 40, 1, 1), (2, 70, 9, 13), (1, 3, 1, 30), (1, 17, 14, 1)], ids=str)
def test_sizes_and_maps_smaller_than_they(device, sizes, shape):
    judge(Work((sizes,), residual=True), shape, device)


@pytest.fixture
def slabs(monkeypatch):
    """A machine of so many processors that few rows and columns already need several programs."""
    monkeypatch.setattr(depthwise_launch, "LEAST_ROWS", 2)
    monkeypatch.setattr(depthwise_launch, "THREADS", 32)
    monkeypatch.setattr(depthwise_launch, "processors", lambda device: 3)


@pytest.mark.parametrize("name", slow("position encoding", "strips and local groups", "LePE and gate"))
def test_slabs_of_rows_and_columns(device, slabs, name):
    plan = depthwise_launch.layout(torch.empty(1, 66, 7, 18), [[torch.empty(66, 1, 5, 5)]], depthwise_launch.NEAR)
    assert (plan.blocks, plan.constants["ROWS"]) == (2, 4)
    assert plan.slabs == 2 * 5
    judge(WORKS[name], (1, 6 if "strips" in name else 66, 7, 18), device)


def test_the_same_bits_every_time_and_any_strides(device, slabs):
    work = Work((((3, 3),),), gated=True)
    given = operands(work, (1, 6, 4, 9), device).to(torch.float32)
    first = results(work, given, kernel)
    contiguous = given._replace(grad=given.grad.contiguous())
    assert not contiguous.grad.is_contiguous(memory_format=torch.channels_last)
    for again in (results(work, given, kernel), results(work, contiguous, kernel)):
        assert all(map(torch.equal, again, first))
    expanded = given._replace(grad=torch.ones((), device=device).expand_as(given.grad))
    for got, expected in zip(results(work, expanded, kernel), results(work, expanded, plain), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("wanted", ["map", "weight"])
def test_without_biases_and_with_one_gradient(device, wanted):
    x, weight = operands(WORKS["interaction"], (1, 6, 5, 4), device).x, torch.randn(6, 1, 3, 3, device=device)
    leaf = (x if wanted == "map" else weight).requires_grad_()
    out = kernels.depthwise_convolutions(x, [weight], [], gelu=True)
    expected = conv2d(gelu(x), weight, padding=1, groups=6)
    torch.testing.assert_close(out, expected)
    found, other = (torch.autograd.grad(y.square().sum(), leaf)[0] for y in (out, expected))
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-4)


def test_gelu_of_infinity(device):
    x = torch.tensor([float("inf"), -float("inf"), 1e30, -1e30], device=device).view(1, 4, 1, 1)
    out = kernels.depthwise_convolutions(x, [torch.ones(4, 1, 1, 1, device=device)], [], gelu=True)
    assert out.flatten().tolist() == [float("inf"), 0, x[0, 2].item(), 0]


def test_what_is_not_a_number_stays_where_it_is_seen(device):
    x = torch.randn(1, 5, 6, 4, device=device).permute(0, 3, 1, 2)
    x[0, 1, 2, 3] = float("nan")
    out = kernels.depthwise_convolutions(x, [torch.ones(4, 1, 3, 3, device=device)], [], gelu=True)
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[0, 1, 1:4, 2:5] = True
    assert torch.equal(out.isnan(), seen)


def test_what_it_refuses(device):
    x, weight = torch.randn(1, 5, 6, 4, device=device).permute(0, 3, 1, 2), torch.randn(4, 1, 3, 3)
    assert depthwise_obstacle(x, [weight], (None, x)) is None
    for reason, args in {
        "not next to each other": (x.contiguous(), [weight], ()),
        "differ in dtype": (x, [weight], (x.double(),)),
        "float64": (x.double(), [weight], ()),
        "of one shape": (x, [weight], (x[:, :, :3],)),
        "9×9": (x, [torch.randn(4, 1, 9, 9)], ()),
        "13×1": (x, [torch.randn(4, 1, 13, 1)], ()),
        "2×2": (x, [torch.randn(4, 1, 2, 2)], ()),
    }.items():
        assert reason in depthwise_obstacle(*args)


@pytest.mark.slow
def test_the_operator_is_as_torch_wants_it(device):
    from linvit.kernels.depthwise_launch import depthwise

    work = Work((STRIPS, ((3, 3),)), gated=True, gelu=True, residual=True)
    given = operands(work, (1, 4, 3, 5), device).to(torch.float32)
    rest = given.y, given.gate, [2, 1], True, True
    library.opcheck(depthwise, (given.x, given.weights, given.biases, *rest))
    library.opcheck(depthwise, (given.x.detach(), given.weights, [], None, None, [2, 1], False, False))


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernels, which are used as if they had passed on this device: weights and options."""
    noted, convolve = [], kernels.depthwise_convolutions

    def note(x, weights, biases, **options):
        noted.append(([tuple(weight.shape[2:]) for weight in weights], options))
        return convolve(x, weights, biases, **options)

    monkeypatch.setattr(backend, "_has_passed", lambda x, which: which == "depthwise")
    monkeypatch.setattr(kernels, "depthwise_convolutions", note)
    return noted


@pytest.mark.parametrize("dynamic", [*slow(False), True])
def test_a_compiler_keeps_it_in_one_graph(device, calls, dynamic):
    conv = DepthwiseConv(6, (3, 3)).to(device)
    graphs = []

    def look(module, inputs):
        graphs.append([node.target for node in module.graph.nodes])
        return module

    both = partial(convolved, conv, gelu=True, residual=True)
    call = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (5, 6) if dynamic else (5,):
        x = torch.randn(1, size, 4, 6, device=device).permute(0, 3, 1, 2).requires_grad_()
        found, expected = ((out, *torch.autograd.grad(out.sum(), (x, conv.weight))) for out in (call(x), both(x)))
        assert all(map(torch.equal, found, expected))
    torch.compile(conv, fullgraph=True, backend=look)(x)
    assert torch.ops.linvit.depthwise.default in graphs[0]


def same(block, x, *rest):
    """Asserts that output and gradients of a block with the kernels are those of plain torch."""
    leaves = (x.requires_grad_(), *block.parameters())
    out = block(x, *rest)
    found = (out, *torch.autograd.grad(out.square().sum(), leaves))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_has_passed", lambda x, which: False)
        other = block(x, *rest)
        expected = (other, *torch.autograd.grad(other.square().sum(), leaves))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.detach().abs().max()))


def map_of(device, width):
    return torch.randn(1, 5, 4, width, device=device).permute(0, 3, 1, 2)


@pytest.mark.parametrize("mechanism", ["rala", *slow("mala")])
def test_a_block_of_a_pyramid_takes_it_three_times(device, calls, mechanism):
    block, x = AttentionBlock(8, 2, mechanism, ffn_ratio=1.5).to(device), map_of(device, 8)
    same(block, x, rotary_table(x, 4))
    lepe = next(options for sizes, options in calls if sizes == [(5, 5)])
    assert lepe["y"] is not None
    assert lepe["gate"] is not None
    assert [sizes for sizes, _ in calls] == [[(3, 3)], [(5, 5)], [(3, 3)]]
    assert [(options["gelu"], options["residual"]) for _, options in calls] == [
        (False, True),
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize("mechanism", ["strips", *slow("linear")])
def test_a_block_of_care_convolves_its_groups_in_one_launch(device, calls, mechanism):
    block = CareBlock(16, 4, mechanism, (1, 1), layer_scale=1.0).to(device).eval()
    same(block, map_of(device, 16))
    strips = [(11, 1), (1, 11)] if mechanism == "strips" else []
    assert [sizes for sizes, _ in calls] == [[*strips, (3, 3), (7, 7)], [(3, 3)], [(3, 3)]]
    assert [options["gelu"] for _, options in calls] == [False, True, True]


def test_a_fused_block_of_care_keeps_its_strips_apart(device, calls):
    block, x = CareBlock(16, 4, "strips", (1, 1), layer_scale=1.0).to(device).eval(), map_of(device, 16)
    with torch.no_grad():
        expected = block(x)
        calls.clear()
        torch.testing.assert_close(fused_block(block)(x), expected)
    assert calls[0][0] == [(11, 1), (1, 11), (3, 3), (7, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["care_nano", "ravlt_nano"])
def test_fused_networks_never_make_strips_dense(device, calls, name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).to(device).eval()
    fused, x = fuse(model), torch.randn(1, 3, 32, 32, device=device)
    with torch.no_grad():
        out = fused(x)
        shapes = {shape for sizes, _ in calls for shape in sizes}
        assert (11, 11) not in shapes
        assert ((11, 1) in shapes) == name.startswith("care")
        assert any(options["gelu"] for _, options in calls)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "_has_passed", lambda x, which: False)
            torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_half_precision_but_sums_do_not(device, calls):
    conv, x = DepthwiseConv(6, (3, 3)).to(device), map_of(device, 6)
    with torch.autocast(device.type, torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
        assert convolved(conv, x, residual=True).dtype == torch.float32
    assert len(calls) == 2


def test_a_layer_leaves_it_where_it_cannot_be_used(device, calls):
    conv, x = DepthwiseConv(6, (3, 3)).to(device), map_of(device, 6)
    conv(x.contiguous())
    DepthwiseConv(6, (9, 9)).to(device)(x)
    conv.double()(x.double())
    conv.float()
    torch.func.grad(lambda y: conv(y).sum())(x)
    assert not calls

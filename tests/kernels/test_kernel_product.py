"""Linear layers and convolutions with what surrounds them, against torch in float64."""

import pytest
import timm
import torch
from tiers import slow
from torch import library

import linvit
from linvit import kernels
from linvit.bench.networks import randomised
from linvit.bench.product import LAYERS, Layer, deviation_of, operands
from linvit.fusion.cuda import Surrounded
from linvit.kernels import product_launch, product_obstacle
from linvit.layers.product import composed, surrounded
from linvit.ops import backend


def judge(layer, shape, device, dtype=torch.float32):
    row = deviation_of(layer, operands(layer, shape, device), dtype)
    assert row.error <= row.allowed, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)])
@pytest.mark.parametrize("name", LAYERS)
def test_what_networks_compute(device, name, dtype):
    judge(LAYERS[name], (2, 9, 7), device, dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 5), *slow((1, 17, 19), (5, 8, 8))], ids=str)
@pytest.mark.parametrize("kernel", [1, 3, *slow(5)])
def test_odd_sizes(device, shape, kernel):
    around = {"residual": (17,), "activation": "gelu"} | ({"norm": True} if kernel == 1 else {})
    judge(Layer((23,), 17, kernel, 1, kernel // 2, **around), shape, device)


@pytest.mark.parametrize("rows", [128, 129, *slow(127, 256)])
def test_tiles(device, rows):
    judge(Layer((65,), 131, norm=True, residual=(3, 128)), (1, 1, rows), device)


def test_smaller_tiles_where_programs_are_few(device, monkeypatch):
    monkeypatch.setattr(product_launch, "processors", lambda device: 3)
    assert product_launch.tile_of(300, 130, 64, device)["ROWS"] == 128
    assert product_launch.tile_of(130, 128, 64, device)["ROWS"] == 64
    judge(Layer((20,), 130), (1, 10, 13), device)


@pytest.mark.parametrize("mean", [300.0, *slow(-3e3)])
def test_a_norm_of_channels_far_from_zero(device, mean):
    layer = Layer((100,), 32, norm=True)
    given = operands(layer, (1, 3, 5), device)
    given["inputs"] = [given["inputs"][0] + mean]
    row = deviation_of(layer, given, torch.float32)
    assert row.error <= row.allowed, row


def test_a_norm_of_equal_channels_is_zero(device):
    x = torch.full((1, 2, 3, 33), 7.0, device=device)
    bias = torch.randn(16, device=device)
    out = kernels.surrounded_product([x], torch.randn(16, 33, device=device), bias, eps=1e-6)
    torch.testing.assert_close(out, bias.expand_as(out))


def test_the_same_bits_every_time(device):
    given = operands(LAYERS["norm and GELU"], (2, 9, 7), device)
    assert torch.equal(kernels.surrounded_product(**given), kernels.surrounded_product(**given))


def test_infinity_and_what_is_not_a_number_stay_in_their_pixel(device):
    x = torch.randn(1, 4, 5, 20, device=device)
    x[0, 1, 2, 3], x[0, 2, 1, 0] = float("nan"), float("inf")
    for eps in (None, 1e-6):
        out = kernels.surrounded_product([x], torch.ones(8, 20, device=device), None, eps=eps, activation="gelu")
        wrong = ~out.isfinite().all(-1)[0]
        assert wrong.nonzero().tolist() == [[1, 2], [2, 1]]


def test_what_it_refuses(device):
    x, weight = torch.randn(1, 5, 6, 8, device=device), torch.randn(4, 8, device=device)
    conv, out = torch.randn(4, 8, 3, 3, device=device), torch.randn(1, 5, 6, 4, device=device)
    assert product_obstacle([x], weight, residual=[out]) is None
    assert product_obstacle([x[..., :2], x[..., 2:]], weight, residual=[out[..., :1], out[..., 1:]]) is None
    assert product_obstacle([x], conv, added=out, padding=1) is None
    for reason, args, around in (
        ("not next to each other", ([x.transpose(1, 3).contiguous().transpose(1, 3)], weight), {}),
        ("not at equal distances", ([x[:, :, :3]], weight), {}),
        ("not at equal distances", ([torch.cat((x, x), -1)[..., :8]], conv), {"padding": 1}),
        ("differ in dtype", ([x], weight), {"added": out.double()}),
        ("float64", ([x.double()], weight.double()), {}),
        ("other sizes", ([x], weight), {"residual": [out[:, :3]]}),
        ("one or two maps", ([x, x, x], weight), {}),
        ("one or two maps", ([x], weight), {"residual": [out, out, out]}),
        ("gradient", ([x.clone().requires_grad_()], weight), {}),
    ):
        assert reason in product_obstacle(*args, **around), reason


@pytest.mark.slow
def test_the_operator_is_as_torch_wants_it(device):
    for name in ("groups, layer scale and sum", "first convolution and GELU"):
        library.opcheck(product_launch.surrounded, tuple(operands(LAYERS[name], (1, 7, 5), device).values()))


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernel, which is used as if it had passed on this device."""
    noted, compute = [], kernels.surrounded_product

    def note(*args, **options):
        noted.append(options)
        return compute(*args, **options)

    monkeypatch.setattr(backend, "_has_passed", lambda x, which: which == "product")
    monkeypatch.setattr(kernels, "surrounded_product", note)
    return noted


@pytest.mark.parametrize("dynamic", [*slow(False), True])
def test_a_compiler_keeps_it_in_one_graph(device, calls, dynamic):
    given = operands(LAYERS["norm and GELU"], (1, 3, 5), device)
    graphs = []

    def look(module, inputs):
        graphs.append([node.target for node in module.graph.nodes])
        return module

    for backend_ in ("aot_eager", look):
        torch._dynamo.reset()
        call = torch.compile(surrounded, fullgraph=True, backend=backend_, dynamic=dynamic)
        for height in (3, 4) if dynamic else (3,):
            x = torch.randn(2, height, 5, 48, device=device)
            found, expected = (function(**{**given, "inputs": [x]}) for function in (call, surrounded))
            assert torch.equal(found, expected)
    assert torch.ops.linvit.product.default in graphs[0]
    assert calls


def test_gradients_and_autocast_are_computed_by_torch(device, calls):
    given = operands(LAYERS["sum"], (1, 3, 5), device)
    x = given["inputs"][0].clone().requires_grad_()
    found, expected = (
        torch.autograd.grad(function(**{**given, "inputs": [x]}).square().sum(), x)[0]
        for function in (surrounded, composed)
    )
    assert torch.equal(found, expected)
    with torch.autocast(device.type, torch.bfloat16):
        surrounded(**given)
    assert not calls
    surrounded(**given)
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano", "care_nano"])
def test_networks_for_gpus(device, calls, monkeypatch, name, dtype):
    """care_nano with the kernels of depthwise convolutions, which leave two maps side by side and not three."""
    wanted = ("product", "depthwise") if name == "care_nano" else ("product",)
    monkeypatch.setattr(backend, "_has_passed", lambda x, which: which in wanted)
    model = randomised(timm.create_model(name, num_classes=3)).to(device)
    x = torch.randn(1, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    fused = linvit.fuse(model, for_device="cuda").to(dtype)
    with torch.no_grad():
        out = fused.forward_features(x.to(dtype))
        expected = model.double().forward_features(x.double())
        layers = [module for module in fused.modules() if isinstance(module, Surrounded)]
        assert len(calls) == len(layers) > 20
        monkeypatch.setattr(backend, "_has_passed", lambda *_: False)
        plain = fused.forward_features(x.to(dtype))
    error, of_torch = ((y - expected).norm() / expected.norm() for y in (out, plain))
    assert error <= (1e-5 if dtype == torch.float32 else 2 * of_torch)

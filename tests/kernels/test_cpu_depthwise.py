"""The gradient of a depthwise convolution's weight by the C++ kernel, against torch in float64."""

import shutil

import pytest
import timm
import torch
from torch.nn.functional import conv2d

from linvit.kernels import cpu
from linvit.layers.convolutions import DepthwiseConv

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")


@pytest.fixture(scope="module", autouse=True)
def built():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


def draw(channels, height, width, batch=2):
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(batch, channels, height, width, generator=generator) for _ in range(2)]
    return [each.to(memory_format=torch.channels_last) for each in maps]


def gradients(layer, x, grad, **options):
    inputs = (x.requires_grad_(), *layer.parameters())
    return torch.autograd.grad(layer(x), inputs, grad, **options)


def compare(layer, x, grad):
    """Gradients of map, weight and bias against float64."""
    found = gradients(layer, x.detach(), grad)
    weight, bias = (parameter.detach().double().requires_grad_() for parameter in layer.parameters())
    wide = x.detach().double().requires_grad_()
    out = conv2d(wide, weight, bias, padding=layer.padding, groups=len(weight))
    expected = torch.autograd.grad(out, (wide, weight, bias), grad.double())
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == torch.float32
        assert (own - other).norm() < 1e-6 * other.norm()


@pytest.mark.parametrize("kernel", [(5, 5), (7, 7), (11, 1), (1, 11), (3, 3)])
@pytest.mark.parametrize("channels", [1, 3, 8, 22, 64, 140])
def test_any_kernel_and_width(kernel, channels):
    compare(DepthwiseConv(channels, kernel), *draw(channels, 9, 14))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 30), (40, 2)])
def test_maps_smaller_than_the_kernel(size):
    compare(DepthwiseConv(20, (5, 5)), *draw(20, *size))


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    x, grad = draw(70, 12, 12)
    layer = DepthwiseConv(70, (5, 5))
    alone = gradients(layer, x, grad)[1]
    torch.set_num_threads(threads)
    try:
        assert torch.equal(gradients(layer, x, grad)[1], alone)
    finally:
        torch.set_num_threads(before)


def test_channels_of_a_wider_map_and_gradients_of_any_strides():
    x, grad = draw(96, 10, 11)[0][:, 32:64], draw(32, 10, 11)[1].contiguous()
    compare(DepthwiseConv(32, (5, 5)), x, grad)
    compare(DepthwiseConv(32, (5, 5)), x, grad[:1, :1, :1, :1].expand_as(x))


def test_long_sums_keep_their_digits():
    x, grad = (1 + 1e-3 * each for each in draw(4, 200, 200, batch=8))
    compare(DepthwiseConv(4, (5, 5)), x, grad)


def test_who_wants_no_gradient_or_another_one_gets_torch(monkeypatch):
    x, grad = draw(8, 6, 6)
    layer, obstacle = DepthwiseConv(8, (5, 5)), cpu.depthwise.obstacle
    assert obstacle(x, layer.weight, layer.padding) is None
    assert "channels last" in obstacle(x.contiguous(), layer.weight, layer.padding)
    assert "float32" in obstacle(x.double(), layer.weight, layer.padding)
    assert "needs no gradient" in obstacle(x, layer.weight.detach(), layer.padding)
    assert "changes the height or width" in obstacle(x, layer.weight, (0, 2))
    with torch.autocast("cpu"):
        assert "float32" in obstacle(x, layer.weight, layer.padding)
    assert torch.autograd.gradcheck(lambda y: layer.double()(y), x.double().requires_grad_())
    layer.float()
    by_weight = gradients(layer, x, grad, create_graph=True)[1]
    (second,) = torch.autograd.grad(by_weight.square().sum(), x)
    assert second.abs().sum() > 0
    monkeypatch.setattr(cpu.depthwise, "depthwise_conv", lambda *_: pytest.fail("taken"))
    with cpu.aside():
        gradients(layer, x, grad)
    torch.func.grad(lambda y: layer(y).sum())(x.detach())
    torch.jit.trace(layer, (x,))


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano"])
def test_networks_train_alike(name, monkeypatch):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).to(memory_format=torch.channels_last).train()
    x = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    calls = []
    kernel = cpu.depthwise.depthwise_conv
    monkeypatch.setattr(cpu.depthwise, "depthwise_conv", lambda *given: calls.append(1) or kernel(*given))

    def gradients_of_step():
        model.zero_grad()
        out = model(x)
        (sum(out) if isinstance(out, tuple) else out).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with cpu.aside():
        expected = gradients_of_step()
    assert not calls
    found = gradients_of_step()
    assert len(calls) >= 4
    norms = [other.norm() for other in expected]
    assert all(
        (own - other).norm() < 1e-3 * max(norm, 1e-2 * max(norms))
        for own, other, norm in zip(found, expected, norms, strict=True)
    )

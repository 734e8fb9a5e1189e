"""The counter of launches on small networks whose kernels are known, and budgets of ours."""

import os

import pytest
import timm
from tiers import quick, slow
from torch import nn

import linvit

pytest.importorskip("triton", reason="Triton is not installed")

from evidence.gpu.graphs import pretended, traced, traced_step
from evidence.gpu.launches import WAYS, copies, counted, launches
from linvit.kernels.record import CALLS
from linvit.layers import Attention2d, rotary_table
from linvit.layers.convolutions import DepthwiseConv

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
FOR_GPUS = "folded for GPUs, all kernels"
GOALS = {"ravlt_tiny": (125, 5.3), "mavit_tiny": (125, 5.3), "care_s0": (165, 2.8)}
# Launches and GB of 64 images of 224 px, grouped and by eager torch, as counted and 2 % more bytes.
BUDGETS = {"ravlt_tiny": (122, 158, 5.0), "mavit_tiny": (118, 154, 4.94), "care_s0": (156, 157, 2.65)}
MEGABYTE = 10**6  # less than a map of 64 images has, and more than weights of the smallest networks
MAP = 2 * 8 * 16 * 16 * 2  # bytes of a map of eight channels of two images of 16 px
IMAGES = 2 * 3 * 16 * 16 * 2


def listed(network, kernels=(), grouped=True):
    """Operators and bytes of each launch."""
    with pretended(kernels):
        graph = traced(network.eval(), 2, 16)
        return [(" ".join(each.names), each.bytes) for each in launches(graph, grouped)]


class Folded(nn.Module):
    """What a function makes of the map of a 1×1 convolution without bias, of eight channels."""

    def __init__(self, function, *layers):
        super().__init__()
        self.conv, self.function, self.layers = nn.Conv2d(3, 8, 1, bias=False), function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self.conv(x), *self.layers)


CONVOLUTION = ("convolution", IMAGES + MAP + 8 * 3 * 2)


def test_operators_on_each_number_are_one_launch_if_grouped():
    network = Folded(lambda x: (x.sigmoid() + x).relu() * 2)
    assert listed(network) == [CONVOLUTION, ("sigmoid add relu mul", 2 * MAP)]
    eager = [CONVOLUTION, ("sigmoid", 2 * MAP), ("add", 3 * MAP), ("relu", 2 * MAP), ("mul", 2 * MAP)]
    assert listed(network, grouped=False) == eager


def test_what_lies_between_two_operators_keeps_them_apart():
    def shared(x, conv):
        y = x.sigmoid()
        return y + conv(y)

    conv = nn.Conv2d(8, 8, 1, bias=False)
    assert [name for name, _ in listed(Folded(shared, conv))] == ["convolution", "sigmoid", "convolution", "add"]
    network = Folded(lambda x, conv: x.sigmoid() + conv(x.sigmoid()), conv)
    assert [name for name, _ in listed(network)] == ["convolution", "sigmoid add", "sigmoid", "convolution"]


def test_a_sum_and_the_norm_after_it_are_one_launch_that_writes_both():
    def function(x, norm):
        x = (x + x.sin()).permute(0, 2, 3, 1)
        return x, norm(x)

    network = Folded(function, nn.LayerNorm(8))
    assert listed(network)[1:] == [("sin add native_layer_norm", 3 * MAP + 2 * 8 * 2)]


def test_rows_of_another_length_are_another_launch():
    network = Folded(lambda x, norm: norm(x.permute(0, 2, 3, 1)).mean((1, 2)), nn.LayerNorm(8))
    assert [name for name, _ in listed(network)] == ["convolution", "native_layer_norm", "mean"]


def test_a_convolution_adds_its_bias_in_a_launch_and_copies_a_slice_before():
    network = Folded(lambda x, conv: conv(x[:, 2:6]), nn.Conv2d(4, 4, 3, padding=1))
    copy, convolution, bias = listed(network)[1:]
    assert copy == ("copy", MAP)
    assert convolution == ("convolution", MAP + 4 * 4 * 9 * 2)
    assert bias == ("bias", MAP + 4 * 2)


def test_a_slice_reads_its_part_and_a_repeated_tensor_once():
    network = Folded(lambda x: x[:, :2] + x[:, 2:4] * x.new_ones(()).expand(2, 2, 16, 16))
    assert listed(network)[1:] == [("mul add", 3 * MAP // 4)]


def test_a_depthwise_convolution_is_one_kernel_with_what_is_around_it():
    network = Folded(lambda x, conv: conv(x), DepthwiseConv(8, (3, 3)))
    weights = 8 * 9 * 2 + 8 * 2
    assert listed(network, ["depthwise"])[1:] == [("depthwise_rows", 2 * MAP + weights)]
    assert [name for name, _ in listed(network)[1:]] == ["convolution", "bias"]


@pytest.mark.parametrize(("mechanism", "kernel"), [("rala", "attend_head"), ("softmax", "softmax_head")])
def test_operators_count_what_their_code_launches(mechanism, kernel):
    network = Folded(lambda x, layer: layer(x, rotary_table(x, 8)), Attention2d(8, 1, mechanism))
    names = [name for name, _ in listed(network, ["bidirectional", "softmax"])]
    assert names.count(kernel) == 1
    assert "softmax_attention" not in names


@pytest.mark.parametrize("name", quick(BUDGETS, ["care_s0"]))
def test_networks_reach_their_goals(name):
    eager, grouped = counted(name, FOR_GPUS)
    assert sum(grouped.kinds.values()) == grouped.launches <= BUDGETS[name][0] <= GOALS[name][0]
    assert eager.launches <= BUDGETS[name][1]
    assert grouped.gigabytes <= eager.gigabytes <= BUDGETS[name][2] <= GOALS[name][1]


def test_a_layer_for_gpus_is_one_kernel_with_what_surrounds_it():
    network = linvit.fuse(timm.create_model("ravlt_nano").eval(), for_device="cuda")
    with pretended(tuple(CALLS)):
        names = [each.names[0] for each in launches(traced(network, 2, 224), grouped=False)]
    assert names.count("product_tile") == 4 + 3 + 5 * 4 + 1  # stem, downsampling, blocks, and the last layer
    assert {"convolution", "bias", "gelu", "silu", "native_layer_norm"}.isdisjoint(names)


def test_1x1_convolutions_are_linear_layers_on_tokens():
    with pretended(tuple(CALLS)):
        names = [each.names[0] for each in launches(traced(timm.create_model("ravlt_nano").eval()), grouped=False)]
    assert names.count("convolution") == 4 + 3  # of the stem, and the downsampling
    assert names.count("addmm") == 5 * 4 + 2  # blocks, last layer, classifier


@pytest.mark.parametrize("way", ["as it is, all kernels", *slow("folded, all kernels", FOR_GPUS)])
@pytest.mark.parametrize("name", ["care_nano", *slow("ravlt_nano", "mavit_nano")])
def test_no_map_is_copied_in_inference(name, way):
    device, _ = WAYS[way]
    network = timm.create_model(name).eval()
    with pretended(tuple(CALLS)):
        graph = traced(network if device is None else linvit.fuse(network, for_device=device))
        assert [each for each in copies(graph) if each.bytes > MEGABYTE] == []


@pytest.mark.parametrize("name", ["care_nano", *slow("ravlt_nano", "mavit_nano")])
def test_in_training_one_map_is_copied_the_gradient_of_the_mean(name):
    """The mean over positions at the end has a gradient that is repeated, and the layer before it needs all of it."""
    network = timm.create_model(name)
    with pretended(tuple(CALLS)):
        found = [each.bytes for each in copies(traced_step(network)) if each.bytes > MEGABYTE]
    assert found == [2 * 64 * network.num_features * 7 * 7 * 2]


@pytest.mark.slow
def test_networks_without_kernels_of_ours_are_counted_as_by_hand():
    """The analysis by hand has 378 launches and 8.65 GB, without sums with biases and tables of the rotation."""
    with pretended(["bidirectional"]):
        graph = traced(linvit.fuse(timm.create_model("ravlt_tiny").eval()))
        left_out = {"bias", "arange", "linspace", "neg", "pow", "cos", "sin", "cat"}
        listed = [each for each in launches(graph, grouped=False) if left_out.isdisjoint(each.names)]
    assert len(listed) == pytest.approx(378, rel=0.05)
    assert sum(each.bytes for each in listed) / 1e9 == pytest.approx(8.65, rel=0.02)

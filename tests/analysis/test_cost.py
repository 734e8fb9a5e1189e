import pytest
import timm
from tiers import quick
from torch import nn

from linvit.analysis.cost import count_cost


def cost(name, **options):
    network = timm.create_model(name, device="meta", **options)
    return count_cost(network, network.pretrained_cfg["input_size"])


def test_a_convolution_and_a_linear_layer_by_hand():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))
    counted = count_cost(network, (3, 32, 32))
    assert counted.macs == 16 * 16 * 8 * 3 * 9 + 8 * 16 * 16 * 10
    assert counted.macs_attention == 0
    assert counted.parameters == sum(parameter.numel() for parameter in network.parameters())


# Module counts at 224 px in G, to the digits that the released networks were measured to.
PUBLISHED = {
    "ravlt_tiny": 2.41,
    "ravlt_small": 4.51,
    "ravlt_base": 9.80,
    "ravlt_large": 16.09,
    "mavit_tiny": 2.44,
    "mavit_small": 4.53,
    "mavit_base": 9.83,
    "mavit_large": 16.14,
    "care_s0": 0.715,
    "care_s1": 1.025,
    "care_s2": 1.918,
}
# (tokens, width, heads, blocks) of each stage, and whether its attention is linear
TINY = [(3136, 64, 1, 2, True), (784, 128, 2, 2, True), (196, 256, 4, 6, False), (49, 512, 8, 2, False)]


@pytest.mark.parametrize("name", quick(PUBLISHED, ["ravlt_tiny", "care_s0"]))
def test_macs_of_the_modules_are_the_papers(name):
    digits = 3 if name.startswith("care") else 2
    assert round(cost(name).macs / 1e9, digits) == PUBLISHED[name]


def test_attention_products_are_those_of_the_formula_and_little_more():
    by_hand = sum(
        2 * blocks * tokens * width * (width // heads if linear else tokens)
        for tokens, width, heads, blocks, linear in TINY
    )
    counted = cost("ravlt_tiny").macs_attention
    assert by_hand <= counted <= 1.03 * by_hand  # the rest are the sums of normaliser and weights


def test_counting_leaves_the_network_alone():
    network = timm.create_model("ravlt_nano").train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    count_cost(network, (3, 32, 32))
    assert network.training
    assert all(value.equal(before[key]) for key, value in network.state_dict().items())

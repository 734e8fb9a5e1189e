"""A mechanism from outside of the package, under a name of its own."""

import json
import re
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import linvit
from linvit.layers.mechanisms import LINEAR_AXES, MECHANISMS
from linvit.layers.token_attention import TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.ops import linear_attention
from linvit_cli import main


def squared(x):
    return torch.relu(x).square()


def halved(num, den, mass, scale, eps):
    return 0.5 / (den + eps), 0.5 * num / (den + eps)


def by_size(query, key, mask):
    return key.square().sum(-1)


@pytest.fixture
def mine():
    yield "mine"
    for table in (MECHANISMS, LINEAR_AXES, TOKEN_LAYERS):
        table.pop("mine", None)


def small(**options):
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5, **options)


def test_its_functions_are_what_a_network_computes(mine):
    linvit.register_mechanism(mine, feature_map=squared, normalizer=halved, weighting=by_size)
    network = linvit.swap_attention(small(), mine)
    attention = network.blocks[0].attn
    x = torch.randn(2, 17, 24)
    query, key, value = attention.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    weights = squared(key).square().sum(-1)
    read = linear_attention(query, key, value, feature_map=squared, normalizer=halved, weighting=weights)
    torch.testing.assert_close(attention(x, grid=(4, 4)), attention.proj(read.transpose(1, 2).flatten(2)))
    assert mine in linvit.list_mechanisms()


def test_it_is_known_to_timm_and_the_benchmark(mine, capsys, tmp_path):
    linvit.register_mechanism(mine, feature_map=("relu", squared))
    network = timm.create_model("deit_tiny_mine", depth=1, img_size=32)
    assert network.mechanism == mine
    assert network(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert timm.create_model("swin_tiny_mine", depths=(1, 1, 1, 1), device="meta").pattern == "LLSS"
    assert main(["bench", "op", mine, "--variants", "plain", "sdpa", "--tokens", "49", "--rounds", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["name"] for row in rows} == {mine, "softmax"}


def test_it_may_be_registered_again_with_a_layer_of_its_own(mine):
    class Doubled(TokenAttention):
        def with_local(self, y, value, x, places):
            return 2 * y

    linvit.register_mechanism(mine, feature_map="relu")
    once = linvit.swap_attention(small(), mine)
    linvit.register_mechanism(mine, feature_map="relu", layer=Doubled)
    twice = linvit.swap_attention(small(), mine)
    twice.load_state_dict(once.state_dict())
    x = torch.randn(1, 17, 24)
    for network in (once, twice):
        nn.init.zeros_(network.blocks[0].attn.proj.bias)
    ours, theirs = (network.blocks[0].attn(x, grid=(4, 4)) for network in (twice, once))
    torch.testing.assert_close(ours, 2 * theirs)


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.exponent = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return nn.functional.softplus(x) ** self.exponent


def test_every_layer_learns_the_parameters_of_a_module(mine):
    power = Power()
    linvit.register_mechanism(mine, feature_map=(power, power))
    network = linvit.swap_attention(small(), mine)
    learned = {name: x for name, x in network.named_parameters() if "exponent" in name}
    assert list(learned) == [f"blocks.{block}.attn.operator.functions.0.exponent" for block in range(2)]
    image = torch.randn(1, 3, 16, 16)
    network(image).square().sum().backward()
    assert all(x.grad.abs() > 0 for x in learned.values())
    assert power.exponent.grad is None

    copied = deepcopy(network).eval()
    with torch.no_grad():
        for x in learned.values():
            x.add_(1)
    changed = network.eval()(image)
    assert (copied(image) - changed).abs().max() > 1e-4
    copied.load_state_dict(network.state_dict())
    torch.testing.assert_close(copied(image), changed)


def plain_functions():
    exponent, power = nn.Parameter(torch.ones(())), Power()
    return {
        "closure": lambda x: squared(x) ** exponent,
        "partial": partial(torch.pow, exponent=exponent),
        "module in a closure": lambda x: power(x),
        "method": power.forward,
    }


@pytest.mark.parametrize("name", plain_functions())
def test_a_plain_function_around_a_parameter_warns(name, mine):
    function = plain_functions()[name]
    with pytest.warns(UserWarning, match=r"`feature_map` is the function .* Make the function an nn.Module") as caught:
        linvit.swap_attention(small(), "linear", attention={"feature_map": ("relu", function)})
    assert len({str(each.message) for each in caught}) == 1, "Python shows equal warnings once"
    with pytest.warns(UserWarning, match="belongs to no network"):
        linvit.register_mechanism(mine, feature_map=function)


def test_functions_without_parameters_and_modules_do_not_warn(recwarn):
    constant = torch.ones(())
    for function in (squared, Power(), lambda x: squared(x) * constant, partial(torch.clamp, min=0)):
        linvit.swap_attention(small(), "linear", attention={"feature_map": function})
    assert not [each for each in recwarn if "nn.Parameter" in str(each.message)]


@pytest.mark.parametrize("axis", ["feature_map", "normalizer", "weighting"])
def test_a_network_takes_a_module_in_the_place_of_each_function(axis):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, *arguments):
            function = {"feature_map": squared, "normalizer": halved, "weighting": by_size}[axis]
            result = function(*arguments)
            return tuple(self.factor * x for x in result) if axis == "normalizer" else self.factor * result

    network = linvit.swap_attention(small(), "linear", attention={axis: Learned()})
    network(torch.randn(1, 3, 16, 16)).sum().backward()
    assert [x.grad is not None for name, x in network.named_parameters() if "factor" in name] == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "rala"}, "`name` is 'rala', which is a mechanism of linvit: choose another"),
        ({"name": "my map"}, "`name` is 'my map', expected a Python identifier"),
        ({"layer": nn.Linear}, "expected a subclass of linvit.layers.token_attention.TokenAttention"),
        ({"feature_map": "nix"}, "`feature_map` is 'nix', expected a function, one of"),
        ({"normalizer": 3}, "`normalizer` is of type int, expected a function or one of"),
        ({"weighting": "nix"}, "`weighting` is 'nix', expected one of"),
    ],
)
def test_what_cannot_be_registered_is_one_sentence(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        linvit.register_mechanism(**{"name": "mine", **options})
    assert "mine" not in MECHANISMS


def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "use" / "own.md").read_text()
    names: dict = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(compile(block, "own.md", "exec"), names)
        assert names["out"].shape == (2, 4, 196, 32)
        assert names["matrix"].shape == (2, 4, 196, 196)
        assert names["gradient"].isfinite()
        for name in ("sharp", "power"):
            network = linvit.swap_attention(small(), name)
            assert network(torch.randn(1, 3, 16, 16)).shape == (1, 5)
        assert "blocks.0.attn.operator.functions.0.exponent" in network.state_dict()
    finally:
        for table in (MECHANISMS, LINEAR_AXES, TOKEN_LAYERS):
            for name in ("sharp", "power"):
                table.pop(name, None)

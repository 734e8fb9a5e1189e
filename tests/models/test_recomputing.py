from unittest.mock import patch

import pytest
import torch
from storages import Storages
from test_all_models import create
from torch.testing import assert_close

from linvit.models.backbone import Stage

NANO = ("ravlt_nano", "mavit_nano", "care_nano")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mavit_nano", "nalaformer_xtiny", "hvittt_tiny")]
PRODUCTS = ("convolution", "mm", "addmm", "bmm")


def step(network, x, what):
    torch.manual_seed(0)  # of stochastic depth
    network.set_recomputing(what)
    network.zero_grad()
    with Storages() as storages:
        network(x).square().sum().backward()
    return (
        [p.grad.clone() for p in network.parameters()],
        {k: v.clone() for k, v in network.state_dict().items()},
        storages,
    )


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano", *OTHERS])
def test_gradients_and_statistics_are_the_same_bit_for_bit(name):
    small = {"depths": (1, 1, 1, 1)} if "nano" not in name else {}
    network = create(name, drop_path_rate=0.3, **small).double().train()
    x = torch.randn(3, 3, 64, 32, dtype=torch.float64)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    runs = {}
    for what in ("nothing", "cheap", "blocks"):
        network.load_state_dict(before)
        runs[what] = step(network, x, what)
    for what in ("cheap", "blocks"):
        for one, other in zip(runs["nothing"][0], runs[what][0], strict=True):
            assert torch.equal(one, other)
        assert all(torch.equal(value, runs[what][1][key]) for key, value in runs["nothing"][1].items())


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano"])
def test_only_cheap_operators_are_computed_twice(name):
    network, x = create(name).train(), torch.randn(2, 3, 64, 64)
    calls = {what: step(network, x, what)[2].calls for what in ("nothing", "cheap", "blocks")}
    products = {what: sum(counted[name] for name in PRODUCTS) for what, counted in calls.items()}
    assert products["cheap"] == products["nothing"] < products["blocks"]
    assert calls["cheap"]["depthwise"] > calls["nothing"]["depthwise"]
    assert calls["cheap"]["gelu"] > calls["nothing"]["gelu"]


def test_nothing_is_wrapped_without_gradients():
    network, x = create("care_nano").eval(), torch.randn(1, 3, 32, 32)
    network.set_recomputing()
    with torch.no_grad(), patch("linvit.models.recomputing.checkpoint") as checkpoint:
        network(x)
    checkpoint.assert_not_called()


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_compiled_as_one_graph(name):
    network, x = create(name).double().train(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = step(network, x, "cheap")[0]
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    network.zero_grad()
    compiled(x).square().sum().backward()
    for one, other in zip(expected, network.parameters(), strict=True):
        assert_close(one, other.grad)


def test_a_stage_says_what_it_recomputes():
    network = create("ravlt_nano")
    assert {stage.recomputed for stage in network.stages if isinstance(stage, Stage)} == {"nothing"}
    network.set_grad_checkpointing()
    assert {stage.recomputed for stage in network.stages} == {"blocks"}
    network.set_grad_checkpointing(False)
    assert {stage.recomputed for stage in network.stages} == {"nothing"}
    with pytest.raises(ValueError, match=r"^`what` is 'all', expected one of nothing, cheap, blocks: change it"):
        network.set_recomputing("all")

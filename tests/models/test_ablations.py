"""Every ablation recipe's change, on the nano network of its family."""

import math
from pathlib import Path

import pytest
import timm
import torch
from test_all_models import create, image, visible
from tiers import quick
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from linvit.runs.recipe_values import read_recipe
from linvit.tasks.optimization import Optimizer

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(ROOT.glob("*/ablations/*.yaml"))
OF_THE_SIZE = {"no_memory": {"widths": (24, 36, 48, 72)}, "symmetric": {"head_widths": (8, 12, 12, 12)}}


def nano(path):
    """The nano network with what the recipe changes; widths and head widths belong to a size, so nano has its own."""
    change = read_recipe(path)["model"]
    name, _ = change.pop("name"), change.pop("drop_path_rate")
    own = OF_THE_SIZE.get(path.stem.partition("_")[2], {})
    assert own.keys() == change.keys() & {"widths", "head_widths"}
    return timm.create_model(f"{name.partition('_')[0]}_nano", num_classes=5, **{**change, **own})


@pytest.mark.parametrize("path", quick(RECIPES, RECIPES[::3]), ids=lambda path: str(path.relative_to(ROOT)))
def test_takes_a_training_step(path):
    network = nano(path).train()
    x, target = image(64, 48, batch=4), torch.arange(4)
    out = network(x)
    loss = cross_entropy(out, target)
    loss.backward()
    assert math.isfinite(loss.item())
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    Optimizer().build(network, 4).step()
    changed = {name for name, parameter in network.named_parameters() if not torch.equal(before[name], parameter)}
    assert changed == before.keys()
    assert cross_entropy(network(x), target).isfinite()


def test_there_is_a_recipe_for_every_row():
    assert len(RECIPES) == 9 + 5 + 9


def test_the_released_values_change_nothing():
    given = {"modulation": "linear", "lepe": True, "rope": True, "feature_map": "elu1", "weighting": "query_mean"}
    ours, released = create("ravlt_nano", attention=given, cpe=True), create("ravlt_nano")
    ours.load_state_dict(released.state_dict())
    assert torch.equal(visible(ours)(image(45, 70)), visible(released)(image(45, 70)))
    care = {"split": "asymmetric", "interactions": (True, True), "memory": True, "local_sizes": (3, 7)}
    ours, released = create("care_nano", **care), create("care_nano")
    ours.load_state_dict(released.state_dict())
    assert torch.equal(visible(ours)(image(45, 70)), visible(released)(image(45, 70)))


def test_softmax_stages_keep_their_attention_but_not_what_is_around_it():
    model = create("ravlt_nano", pattern="LLSS", attention={"feature_map": "relu", "modulation": "none"})
    blocks = [stage.blocks[0] for stage in model.stages]
    assert [block.attn.operator.mechanism for block in blocks] == ["rala", "rala", "softmax", "softmax"]
    assert all(block.attn.modulate is None for block in blocks)
    assert blocks[0].attn.operator.options["feature_map"] == "relu"


def test_axes_without_a_linear_stage_are_refused():
    with pytest.raises(ValueError, match="`attention` has 'weighting', but SSSS has no linear stage"):
        create("ravlt_nano", pattern="SSSS", attention={"weighting": "uniform"})
    create("ravlt_nano", pattern="SSSS", attention={"modulation": "none"})


def test_learned_axis_values_are_not_decayed():
    model = create("mavit_nano", attention={"normalizer": "learned", "weighting": "learned"})
    names = ("beta", "gamma", "mean_query")
    learned = {f"stages.{i}.blocks.0.attn.operator.{name}" for i in range(4) for name in names}
    assert model.no_weight_decay() == set()
    groups = Optimizer().build(model, 4).param_groups
    spared = {id(parameter) for group in groups if group["weight_decay"] == 0 for parameter in group["params"]}
    assert {
        name for name, parameter in model.named_parameters() if name in learned and id(parameter) in spared
    } == learned


def test_classifiers_read_the_width_where_the_second_interaction_is_missing():
    model = visible(create("care_nano", interactions=(True, False), num_classes=3))
    assert (model.num_features, model.feature_info[-1]["num_chs"]) == (96, 96)
    assert model.forward_features(image(64, 64)).shape == (2, 96, 2, 2)
    assert model(image(64, 64)).shape == (2, 3)


EXPORTED = [path for path in RECIPES if path.stem in ("s2_stacked", "tiny_phi_identity")]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_ablated_networks_export(path):
    network = visible(nano(path).eval())
    program = torch.export.export(network, (image(64, 96),)).module()
    assert_close(program(image(64, 96)), network(image(64, 96)))

import math

import pytest
import timm
import torch

from linvit.tasks.optimization import Optimizer, Schedule


@pytest.fixture
def network():
    return timm.create_model("ravlt_nano", num_classes=10)


def rates(schedule, steps=100, per_epoch=10):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    built = schedule.build(optimizer, steps, per_epoch)
    out = []
    for step in range(steps + 1):
        built.step_update(step)
        out.append(optimizer.param_groups[0]["lr"])
    return out


def test_warm_up_is_linear_and_cosine_runs_underneath_it():
    values = rates(Schedule(warmup_epochs=2, warmup_lr=0.0, min_lr=0.1))
    assert values[:20] == pytest.approx([step / 20 for step in range(20)])
    assert values[50] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.5)) / 2)
    assert values[100] == pytest.approx(0.1)


def test_warm_up_can_come_first():
    values = rates(Schedule(warmup_epochs=2, warmup_lr=0.0, min_lr=0.1, warmup_first=True))
    assert values[20] == pytest.approx(1.0)
    assert values[60] == pytest.approx(0.1 + 0.9 / 2)


def test_cool_down_stays_at_the_lowest_rate_at_the_end():
    values = rates(Schedule(min_lr=0.1, cooldown_epochs=3))
    assert values[70:] == [0.1] * 31
    assert values[35] == pytest.approx(0.1 + 0.9 / 2)


def test_learning_rate_scales_with_the_global_batch(network):
    assert Optimizer(lr=5e-4, lr_batch=512).build(network, 1024).param_groups[0]["lr"] == pytest.approx(1e-3)
    assert Optimizer(lr=5e-4).build(network, 1024).param_groups[0]["lr"] == pytest.approx(5e-4)


def test_only_matrices_decay(network):
    groups = Optimizer(weight_decay=0.05).build(network, 64).param_groups
    for group in groups:
        assert all((parameter.ndim > 1) == (group["weight_decay"] > 0) for parameter in group["params"])
    held = sum(len(group["params"]) for group in groups)
    assert held == len(list(network.parameters()))


def test_only_norms_are_spared_where_detectors_ask_for_it(network):
    spared, decayed = Optimizer(weight_decay=0.05, not_decayed="norms").build(network, 16).param_groups
    norms = [module for module in network.modules() if "Norm" in type(module).__name__]
    own = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    assert own
    assert {id(parameter) for parameter in spared["params"]} == own
    assert (spared["weight_decay"], decayed["weight_decay"]) == (0, 0.05)
    assert any(parameter.ndim == 1 for parameter in decayed["params"])  # biases and layer scales
    assert len(spared["params"]) + len(decayed["params"]) == len(list(network.parameters()))


def test_everything_can_decay(network):
    groups = Optimizer(weight_decay=1e-4, not_decayed="none").build(network, 16).param_groups
    assert {group["weight_decay"] for group in groups} == {1e-4}


def test_steps_fall_at_their_epochs_after_a_warm_up_in_steps():
    schedule = Schedule("steps", warmup_steps=5, warmup_lr=1e-3, decay_epochs=[8, 4], decay_rate=0.1)
    values = rates(schedule)
    assert values[0] == pytest.approx(1e-3)
    assert values[5:40] == [1.0] * 35
    assert values[40:80] == pytest.approx([0.1] * 40)
    assert values[80:] == pytest.approx([0.01] * 21)


def test_poly_bends_down_to_the_lowest_rate():
    values = rates(Schedule("poly", power=0.9, min_lr=0.1))
    assert values == pytest.approx([0.1 + 0.9 * (1 - step / 100) ** 0.9 for step in range(100)] + [0.1])


def test_values_that_the_optimizer_refuses_are_one_sentence(network):
    with pytest.raises(ValueError, match=r"The optimizer adamw refuses the `options` .*beta"):
        Optimizer(options={"betas": [2, 3]}).build(network, 64)

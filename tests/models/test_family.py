import pytest
import torch

from linvit.models.family import WRAPPERS, imagenet_cfg, renamed, stage_mechanisms, unwrapped

LETTERS = {"L": "rala", "S": "softmax"}


def test_stage_mechanisms_reads_one_letter_a_stage():
    assert stage_mechanisms("LSLS", LETTERS) == ("rala", "softmax", "rala", "softmax")


@pytest.mark.parametrize("pattern", ["LLS", "LLSSS", "LLSC", "llss", ""])
def test_stage_mechanisms_refuses(pattern):
    with pytest.raises(ValueError, match=r"expected four letters out of \(L = rala, S = softmax\)"):
        stage_mechanisms(pattern, LETTERS)


def test_unwrapped_prefers_averaged_weights():
    states = {name: {"key": torch.tensor(i)} for i, name in enumerate(WRAPPERS)}
    for i, name in enumerate(WRAPPERS):
        assert unwrapped(states)["key"] == i
        del states[name]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_unwrapped_takes_prefixes_off(prefix):
    assert set(unwrapped({"model": {f"{prefix}head.bias": torch.zeros(1)}})) == {"head.bias"}


def test_unwrapped_leaves_plain_weights_and_absent_averages():
    state = {"model.weight": torch.zeros(1), "model_ema": None}
    assert unwrapped(state).keys() == state.keys()


def test_renamed_applies_every_rule_in_turn():
    assert renamed("a.1.b", [(r"^a\.", "x."), (r"^x\.(\d)", r"y.\1\1")]) == "y.11.b"


def test_imagenet_cfg_can_be_overridden():
    assert imagenet_cfg(pool_size=(1, 1), notes="x") == {**imagenet_cfg(), "pool_size": (1, 1), "notes": "x"}

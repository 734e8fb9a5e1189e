"""Our networks equal the released ones, in float64.

`python -m pytest -m "slow or not slow" tests/models/test_parity.py -s` prints the table of all eleven. The relative
error of a tensor is max|ours - released| / max|released| over its recorded values, which have 12 digits.
"""

import numpy as np
import pytest
import timm
import torch
from golden_networks import NAMES, golden, probe, released_input, released_keys, released_state_dict

import linvit

QUICK = ("RAVLT_T", "MALA_T", "CARETrans_S0")
TOLERANCE = 1e-8


def largest_errors(released_name: str) -> dict[str, float]:
    """The largest relative error in the four stages' outputs (values, mean, std) and in the logits."""
    record = golden(released_name)
    model = timm.create_model(NAMES[released_name], dtype=torch.float64).eval()
    linvit.load_released(model, released_state_dict(record))
    with torch.no_grad():
        features, stages = model.forward_intermediates(released_input(record))
        logits = model.forward_head(features)
    errors = {}
    for i, (ours, theirs) in enumerate(zip(stages, record["stages"], strict=True), start=1):
        errors[f"stage {i}"] = _error(ours, theirs)
    return errors | {"logits": _error(logits, record["logits"])}


def _error(ours: torch.Tensor, theirs: dict) -> float:
    assert list(ours.shape) == theirs["shape"]
    ours_all = np.array([*probe(ours), ours.mean().item(), ours.std(correction=0).item()])
    theirs_all = np.array([*theirs["value"], theirs["mean"], theirs["std"]])
    return float(np.abs(ours_all - theirs_all).max() / np.abs(theirs["value"]).max())


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("\n\nreleased      ours           stage 1   stage 2   stage 3   stage 4   logits")
    for released_name, errors in rows:
        print(f"{released_name:13} {NAMES[released_name]:13}", *(f"{error:9.1e}" for error in errors.values()))


@pytest.mark.parametrize(
    "released_name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_equals_released_network(released_name, table):
    errors = largest_errors(released_name)
    table.append((released_name, errors))
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("released_name", NAMES)
def test_every_released_key_has_its_place(released_name):
    model = timm.create_model(NAMES[released_name], device="meta")
    keys = released_keys(golden(released_name))
    rest = {key: torch.empty(shape, device="meta") for key, shape, _ in keys if "angle" not in key}
    native = model.native_state_dict(rest)
    assert {key: value.shape for key, value in native.items()} == {k: v.shape for k, v in model.state_dict().items()}


@pytest.mark.parametrize("released_name", ["RAVLT_T", "CARETrans_S0"])
def test_keys_are_translated_once_in_any_order_and_without_heads(released_name):
    model, released = timm.create_model(NAMES[released_name], device="meta"), released_state_dict(golden(released_name))
    native = model.native_state_dict(released)
    turned = model.native_state_dict(dict(reversed(released.items())))
    for other in (model.native_state_dict(native), turned):
        assert other.keys() == native.keys() == model.state_dict().keys()
        assert all(torch.equal(other[key], native[key]) for key in native)
    headless = model.native_state_dict({key: value for key, value in released.items() if "head" not in key})
    assert headless.keys() == {key for key in native if "head" not in key}

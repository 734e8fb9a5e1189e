"""H-ViT³: the released network, and what refuses its nonlinear read."""

import json

import pytest
import timm
import torch
from golden_networks import FOLDER, filled, released_input
from test_all_models import create, image
from torch.testing import assert_close

import linvit
from linvit.streaming import run_in_strips


def test_equals_the_released_network():
    """On a map of 16 × 24; the released code ran with these weights under its own names."""
    record = json.loads((FOLDER / "HViTTT.json").read_text())
    model = timm.create_model("hvittt_tiny", **record["arguments"]).double().eval()
    shapes = [(key, value.shape) for key, value in model.state_dict().items() if value.ndim]
    model.load_state_dict(filled(shapes), strict=False)
    with torch.no_grad():
        logits = model(released_input(record))
    assert_close(logits, torch.tensor(record["logits"], dtype=torch.float64), rtol=0, atol=1e-12)


def test_what_needs_linear_attention_refuses_it():
    model = create("hvittt_tiny")
    assert model.pattern == "LLLL"
    with pytest.raises(ValueError, match=r"stages\.0\.blocks\.0\.attn\.operator reads its values nonlinearly"):
        run_in_strips(model, image(45, 70))
    with pytest.raises(ValueError, match="`model` is a HViTTT without softmax attention that we know"):
        linvit.linearize(model, "mala")

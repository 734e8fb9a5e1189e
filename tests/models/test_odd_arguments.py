"""Odd values for every argument of networks: a sentence that names the argument, before memory is taken."""

import inspect
import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.models import CARE, RAVLT, swap_attention
from linvit.models.by_name import FAMILIES, create
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import FRAMEWORKS, build_dense
from linvit.models.swap import GIVEN, TIMM
from linvit.ranges import declared
from linvit.released import convert, load_released

# no argument takes any of these
ODD = (
    "odd",
    -1.5,
    math.nan,
    b"x",
    object(),
    {1: 2},
    ("odd",) * 4,
    (math.nan,) * 4,
    np.arange(4),
    torch.ones(2),
)
BUILDER = ("out_indices", "features_only", "pretrained")
NETWORKS = [
    ("ravlt_nano", (*declared(RAVLT), *BUILDER)),
    ("care_nano", (*declared(CARE), *BUILDER)),
    ("deit_tiny_rala", (*(TIMM.keys() - {"mechanism"}), *BUILDER)),
    ("swin_tiny_softmax", (*(TIMM.keys() - {"mechanism"}), *BUILDER)),
]


def arguments_of(kind):
    own = {name for name, p in inspect.signature(nn.Module).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return [name for name in declared(kind) if name not in own]


def refused(name, call):
    """What is accepted of the odd values, or refused without the name of the argument."""
    faults = []
    for odd in ODD:
        try:
            call({name: odd})
        except (TypeError, ValueError) as error:
            if name not in str(error):
                faults.append(f"{name}={odd!r}: {error}")
        else:
            faults.append(f"{name}={odd!r} is accepted")
    return faults


@pytest.mark.parametrize(("name", "arguments"), NETWORKS)
def test_networks_of_timm(name, arguments):
    def call(odd):
        features = {"features_only": True} if "out_indices" in odd else {}
        timm.create_model(name, **{"device": "meta", **features, **odd})

    assert [fault for argument in sorted(arguments) for fault in refused(argument, call)] == []


@pytest.mark.parametrize(
    ("name", "family"), [("sequence_nano", "sequence"), ("conformer_nano", "speech"), ("dit_nano_patch2", "generation")]
)
def test_networks_of_the_registry(name, family):
    first, *others = arguments_of(FAMILIES[family].network)
    faults = refused(first, lambda odd: create(name, odd[first]))
    faults += refused("family", lambda odd: create(name, 3, **odd))
    faults += [
        fault
        for argument in others
        for fault in refused(argument, lambda odd: create(name, 3, **{"device": "meta", **odd}))
    ]
    assert faults == []


def test_options_of_the_attention_in_a_pyramid():
    faults = [
        fault
        for name in ("modulation", "lepe", "rope")
        for fault in refused(name, lambda odd: timm.create_model("ravlt_nano", attention=odd, device="meta"))
    ]
    assert faults == []


@pytest.mark.parametrize("mechanism", ["rala", "polaformer", "agent", "focused"])
def test_options_of_a_mechanism(mechanism):
    model = timm.create_model("deit_tiny_patch16_224", depth=1, device="meta")
    names = sorted(set(arguments_of(TOKEN_LAYERS[mechanism])) - GIVEN)
    faults = [
        fault for name in names for fault in refused(name, lambda odd: swap_attention(model, mechanism, attention=odd))
    ]
    assert faults == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_detectors_and_segmentors(framework):
    body = DenseBackbone("ravlt_nano", device="meta")
    with torch.device("meta"):
        given = {"backbone": body, "num_classes": 2, "width": 8}
        faults = [
            fault
            for name in arguments_of(FRAMEWORKS[framework])
            for fault in refused(name, lambda odd: FRAMEWORKS[framework](**{**given, **odd}))
        ]
    assert faults == []
    assert refused("heads", lambda odd: build_dense(framework, "ravlt_nano", 2, device="meta", **odd)) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: timm.create_model("deit_tiny_rala", attention={"lpe": 2}, device="meta"),
            "key 'lpe'.*Did you mean 'lepe'",
        ),
        (lambda: timm.create_model("ravlt_nano", heads=(2, 3, 4, 5), device="meta"), "`width` is 96 and `heads` 5"),
        (lambda: timm.create_model("hvittt_tiny", heads=(3, 4, 10, 16), device="meta"), "`width` is 64 and `heads` 3"),
        (
            lambda: timm.create_model("ravlt_nano", heads=(16, 3, 4, 6), device="meta"),
            "head width is 2, expected a multiple of 4",
        ),
        (
            lambda: swap_attention(nn.Linear(2, 2), "rala"),
            "`model` is of type Linear, expected one of VisionTransformer.*: choose",
        ),
        (lambda: swap_attention(None, "rala", 3), "`pattern` is 3, expected text, or null"),
        (lambda: swap_attention(None, "rala", None, [1]), r"`attention` is \[1\], expected a mapping"),
        (
            lambda: load_released(timm.create_model("care_nano", device="meta"), 3),
            "`source` is of type int, expected a path",
        ),
        (lambda: convert({}, "x.safetensors", "ravlt_nanno"), "did you mean 'ravlt_nano'"),
        (lambda: DenseBackbone("ravlt_nano", patern="LLLL"), "did you mean `pattern`"),
        (lambda: DenseBackbone("deit_tiny_rala", device="meta"), "strides|four maps"),
    ],
)
def test_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_head_that_does_not_turn_needs_no_multiple_of_four():
    model = timm.create_model("ravlt_nano", heads=(16, 3, 4, 6), attention={"rope": False}).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)


def test_a_backbone_is_made_once(monkeypatch):
    made = []
    create_model = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *args, **kwargs: made.append(args) or create_model(*args, **kwargs)
    )
    assert DenseBackbone("swin_tiny_softmax", device="meta").channels == (96, 192, 384, 768)
    assert len(made) == 1

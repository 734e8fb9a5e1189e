"""The layers of NaLaFormer, PolaFormer, PolaFormer++, RecNeXt and ViT³ against the released ones; what is delicate."""

import math
import zlib

import numpy as np
import pytest
import torch
from golden_networks import filled, golden, released_input
from torch.testing import assert_close

from linvit.layers.token_mechanisms import TOKEN_LAYERS

RECORDS = golden("mechanisms_2026")


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def weights_of(record):
    """The parameters and buffers by the rule of the golden numbers, with its exceptions."""
    weights = filled([*record["parameters"], *record["buffers"]])
    for key, shape in record["parameters"]:
        noise = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
        if key in ("w1", "w2"):
            weights[key] = torch.from_numpy(noise / math.sqrt(shape[-1]))
        elif key in ("s1", "s2", "power"):
            weights[key] = torch.from_numpy(noise)
    return weights


def size_of(name):
    return tuple(map(int, name.rsplit("_", 1)[1].split("x")))


def loaded(mechanism, weights, grid, heads=2, **options):
    width = weights["proj.bias"].numel()
    layer = TOKEN_LAYERS[mechanism](width, heads, mechanism, grid, **options).eval()
    layer.load_state_dict(weights, strict=mechanism != "recnext")
    return layer


# Each returns our layer and what of its gradients is each released parameter: (our parameter, the part of it).
def vittt(weights, name, grid):
    width = 64
    ours = {
        "operator.w1": weights["w1"][0],
        "operator.w2": weights["w2"][0],
        "w3": weights["w3"][:, 0],
        "qkv.weight": weights["qkv.weight"][: 3 * width],
        "qkv.bias": weights["qkv.bias"][: 3 * width],
        "local_qkv.weight": weights["qkv.weight"][3 * width :],
        "local_qkv.bias": weights["qkv.bias"][3 * width :],
        "proj.weight": weights["proj.weight"][:, :width],
        "proj.bias": weights["proj.bias"],
        "local_proj.weight": weights["proj.weight"][:, width:],
    }
    parts = {key: [(ours_key, ...)] for key, ours_key in (("w1", "operator.w1"), ("w2", "operator.w2"), ("w3", "w3"))}
    parts |= {f"qkv.{kind}": [(f"qkv.{kind}", ...), (f"local_qkv.{kind}", ...)] for kind in ("weight", "bias")}
    parts |= {"proj.weight": [("proj.weight", ...), ("local_proj.weight", ...)], "proj.bias": [("proj.bias", ...)]}
    return loaded("vittt", ours, grid, heads=4, rope=name == "vittt_rotated"), parts


def gated(mechanism, weights, grid, also, out):
    width = 64
    ours = {
        **{f"lepe.{kind}": weights[f"lepe.{kind}"] for kind in ("weight", "bias")},
        **{f"proj.{kind}": weights[f"{out}.{kind}"] for kind in ("weight", "bias")},
        **{f"qkv.{kind}": weights[f"qkvg.{kind}"][: 3 * width] for kind in ("weight", "bias")},
        **{f"modulation.{kind}": weights[f"qkvg.{kind}"][3 * width :] for kind in ("weight", "bias")},
        **also,
    }
    parts = {f"qkvg.{kind}": [(f"qkv.{kind}", ...), (f"modulation.{kind}", ...)] for kind in ("weight", "bias")}
    parts |= {f"{out}.{kind}": [(f"proj.{kind}", ...)] for kind in ("weight", "bias")}
    parts |= {f"lepe.{kind}": [(f"lepe.{kind}", ...)] for kind in ("weight", "bias")}
    return loaded(mechanism, ours, grid), parts


def nala(weights, name, grid):
    also = {f"ln.{kind}": weights[f"ln.{kind}"] for kind in ("weight", "bias")}
    layer, parts = gated("nala", weights, grid, also, "out_proj")
    return layer, parts | {key: [(key, ...)] for key in also}


def polaformer_plus_plus(weights, name, grid):
    also = {"sharpness": torch.stack((weights["s1"][0], weights["s2"][0]), dim=1)}
    layer, parts = gated("polaformer_pp", weights, grid, also, "proj")
    every = slice(None)
    return layer, parts | {"s1": [("sharpness", (every, 0))], "s2": [("sharpness", (every, 1))]}


def polaformer(weights, name, grid):
    """qg has the rows of queries and gate, kv those of keys and values."""
    kinds, width = ("weight", "bias"), 64
    ours = {
        **{key: weights[key] for key in ("scale", "positional_encoding", "dwc.weight", "dwc.bias")},
        **{f"proj.{kind}": weights[f"proj.{kind}"] for kind in kinds},
        "power": weights["power"].flatten(),
        **{f"qkv.{kind}": torch.cat((weights[f"qg.{kind}"][:width], weights[f"kv.{kind}"])) for kind in kinds},
        **{f"modulation.{kind}": weights[f"qg.{kind}"][width:] for kind in kinds},
    }
    parts = {key: [(key, ...)] for key in ours if not key.startswith(("qkv", "modulation"))}
    for kind in kinds:
        parts[f"qg.{kind}"] = [(f"qkv.{kind}", slice(width)), (f"modulation.{kind}", ...)]
        parts[f"kv.{kind}"] = [(f"qkv.{kind}", slice(width, None))]
    return loaded("polaformer", ours, grid), parts


def recnext(weights, name, grid):
    """The released module has v = x, no output projection, and projects each half of the channels by itself."""
    half, inner = "recattn" in name, "down.1." if "recattn" in name else ""
    width = 32
    first, second = weights[f"{inner}qk.conv.weight"].flatten(1).chunk(2)
    norms = ("weight", "bias", "running_mean", "running_var")
    ours = {
        "qkv.weight": torch.cat((torch.block_diag(first, second), torch.eye(width))),
        "qkv.bias": torch.zeros(3 * width),
        "proj.weight": torch.eye(width),
        "proj.bias": torch.zeros(width),
    }
    parts = {
        f"{inner}qk.conv.weight": [
            ("qkv.weight", (slice(32), slice(16))),
            ("qkv.weight", (slice(32, 64), slice(16, 32))),
        ]
    }
    places = {f"{inner}pe": "lepe", **({"down.0": "down", "conv": "up"} if half else {})}
    for theirs, mine in places.items():
        ours[f"{mine}.0.weight"] = weights[f"{theirs}.conv.weight"]
        parts[f"{theirs}.conv.weight"] = [(f"{mine}.0.weight", ...)]
    for theirs, mine in {f"{inner}qk": "qk_norm", **{k: f"{v}.1" for k, v in places.items()}}.items():
        for kind in norms:
            ours[f"{mine}.{kind}"] = weights[f"{theirs}.norm.{kind}"]
        for kind in norms[:2]:
            parts[f"{theirs}.norm.{kind}"] = [(f"{mine}.{kind}", ...)]
    return loaded("recnext", ours, grid, heads=4, half=half), parts


RELEASED = {f.__name__: f for f in (vittt, nala, polaformer_plus_plus, polaformer, recnext)}
NAMES = [name for name in RECORDS if not name.startswith("mhla") and isinstance(RECORDS[name], dict)]


def released(name):
    made = max((released for released in RELEASED if name.startswith(released)), key=len)
    record = RECORDS[name]
    shape = record["input_shape"]
    grids = {"vittt": (6, 8), "vittt_rotated": (7, 5)}
    layer, parts = RELEASED[made](
        weights_of(record), name, grids.get(name) or tuple(shape[-2:] if len(shape) == 4 else size_of(name))
    )
    return record, layer, parts


def same(tensor, expected):
    assert list(tensor.shape) == expected["shape"]
    values = torch.tensor(expected["value"])
    assert_close(tensor.flatten()[expected["index"]], values, rtol=1e-10, atol=1e-10 * values.abs().max().item())
    assert_close(tensor.mean().item(), expected["mean"], rtol=1e-10, atol=1e-12)
    assert_close(tensor.std(correction=0).item(), expected["std"], rtol=1e-10, atol=0)


def test_every_record_is_compared():
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_released_module(name):
    record, layer, parts = released(name)
    x = released_input(record).requires_grad_()
    tokens = x.flatten(2).mT if x.ndim == 4 else x
    y = layer(tokens)
    out = y.mT.unflatten(-1, x.shape[2:]) if x.ndim == 4 else y
    same(out.detach(), record["output"])
    w = torch.from_numpy(np.random.RandomState(1).standard_normal(out.shape))
    (out * w).sum().backward()
    same(x.grad, record["input_gradient"])
    parameters = dict(layer.named_parameters())
    assert set(parts) == set(record["gradient_norms"])
    for key, norm in record["gradient_norms"].items():
        ours = [parameters[mine].grad[part].flatten() for mine, part in parts[key]]
        assert_close(torch.cat(ours).norm().item(), norm, rtol=1e-10, atol=1e-12 * norm, msg=key)

"""The layers of NaLaFormer, PolaFormer, PolaFormer++, RecNeXt and ViT³ against the released ones; what is delicate."""

import math
import zlib

import numpy as np
import pytest
import torch
from golden_networks import assert_recorded, filled, golden, released_input
from tiers import quick
from torch.testing import assert_close

from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.ops import merge
from linvit.ops.position import rotate
from linvit.ops.state import summarize, token_weights

RECORDS = golden("mechanisms_2026")
pytestmark = pytest.mark.usefixtures("float64")


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


def test_every_record_is_compared():
    assert len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_released_module(name):
    record, layer, parts = released(name)
    x = released_input(record).requires_grad_()
    tokens = x.flatten(2).mT if x.ndim == 4 else x
    y = layer(tokens)
    out = y.mT.unflatten(-1, x.shape[2:]) if x.ndim == 4 else y
    assert_recorded(out.detach(), record["output"])
    w = torch.from_numpy(np.random.RandomState(1).standard_normal(out.shape))
    (out * w).sum().backward()
    assert_recorded(x.grad, record["input_gradient"])
    parameters = dict(layer.named_parameters())
    assert set(parts) == set(record["gradient_norms"])
    for key, norm in record["gradient_norms"].items():
        ours = [parameters[mine].grad[part].flatten() for mine, part in parts[key]]
        assert_close(torch.cat(ours).norm().item(), norm, rtol=1e-10, atol=1e-12 * norm, msg=key)


@pytest.mark.parametrize("name", ["vittt", "vittt_rotated"])
def test_the_inner_step_leads_to_the_released_weights(name):
    record, layer, _ = released(name)
    x = released_input(record)
    _, key, value = layer.query_key_value(x, layer.grid)
    rotary = layer.rotary(x, layer.grid)
    key = key if rotary is None else rotate(key, rotary)
    w1, w2 = layer.operator.updated(layer.operator.sums(key, value), x.shape[1]).chunk(2, dim=-1)
    _, key, value = layer.local_qkv(x).mT.chunk(3, dim=1)
    w3 = layer.updated(key, value, layer.grid).flatten(0, 1).unsqueeze(1)
    for ours, expected in ((w1, "updated_w1"), (w2, "updated_w2"), (w3, "updated_w3")):
        assert_recorded(ours.detach(), record[expected])


def layer_of(mechanism, width=16, heads=2, grid=(4, 6), **options):
    layer = TOKEN_LAYERS[mechanism](width, heads, mechanism, grid, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return layer


def test_sums_of_parts_of_an_image_add_up():
    """In any order, and equal to the state of linear attention whose values are the derivatives at each token."""
    operator = layer_of("vittt").operator
    key, value = torch.randn(2, 1, 2, 37, 8).unbind(0)
    whole = operator.sums(key, value)
    parts = [operator.sums(key[:, :, part], value[:, :, part]) for part in (slice(20, 37), slice(5), slice(5, 20))]
    assert_close(sum(parts), whole)
    first, second = key @ operator.w1, key @ operator.w2
    gate = second.sigmoid()
    pulled = torch.cat((value * second * gate, value * first * gate * (1 + second * (1 - gate))), dim=-1)
    state = merge(*(state_of(key[:, :, part], pulled[:, :, part]) for part in (slice(9), slice(9, 37))))
    assert_close((state.S + state.r.unsqueeze(-1) * state.u.unsqueeze(-2)) * 37, whole)


def state_of(key, value):
    weights = token_weights("uniform", key, key, None)
    return summarize(key, key, value, weights)


def test_a_class_token_is_in_the_first_branch_only():
    layer = layer_of("vittt", num_prefix=1)
    x = torch.randn(1, 25, 16)
    moved = torch.cat((x[:, :1] + torch.randn(16), x[:, 1:]), dim=1)
    assert torch.equal(layer.local(x[:, 1:], (4, 6)), layer.local(moved[:, 1:], (4, 6)))
    assert not torch.allclose(layer(x)[:, 1:], layer(moved)[:, 1:])
    expected = layer(x)[:, 0]
    with torch.no_grad():
        layer.local_proj.weight.mul_(3)
    assert torch.equal(layer(x)[:, 0], expected)


def test_zeros_have_derivatives():
    """Queries, keys and values of zeros, where norms have no derivative, powers no logarithm, and den is 0."""
    for mechanism in ("vittt", "nala", "polaformer", "polaformer_pp"):
        layer = layer_of(mechanism)
        with torch.no_grad():
            for projection in (layer.qkv, getattr(layer, "local_qkv", layer.qkv)):
                projection.weight.zero_()
                projection.bias.zero_()
        x = torch.randn(2, 24, 16, requires_grad=True)
        y = layer(x)
        assert y.isfinite().all()
        y.square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), (mechanism, name)
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("mechanism", "size"),
    [("nala", 60.0), ("nala", 1e-4), ("polaformer_pp", 12.0), ("polaformer", 12.0), ("vittt", 8.0), ("recnext", 60.0)],
)
def test_half_precision_neither_overflows_nor_vanishes(dtype, mechanism, size):
    """60³ and e¹² are beyond float16; squares of 1e-4 are below it.

    Without rotation, which turns num and not den: after e¹² their quotient is itself beyond float16.
    """
    options = {"rope": False} if mechanism == "polaformer_pp" else {}
    layer, x = layer_of(mechanism, **options), torch.randn(2, 24, 16)
    query_and_key = layer.qkv.weight.data[:32]
    query_and_key.mul_(size / (x @ query_and_key.mT).abs().amax())
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.grad is not None)
    with torch.no_grad():
        exact = layer.double()(x.double())
    # A key of size s that is rounded by ε changes its e^s by s ε, and its power p by p ε; four steps follow.
    steps = {"polaformer_pp": size, "nala": 4.5}.get(mechanism, 8.0)
    assert (y.double() - exact).norm() / exact.norm() < 8 * steps * torch.finfo(dtype).eps


@pytest.mark.parametrize("autocast", quick([False, True], [False]))
def test_many_tokens_in_float16(autocast):
    """Released, v / (3N) is subnormal in float16 from about 5,000 tokens on; here the sums are float32."""
    layer = layer_of("vittt", grid=(100, 100))
    x = torch.randn(1, 10000, 16)
    with torch.no_grad():
        exact = layer(x)
        if autocast:
            layer = layer.float()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x.float())
        else:
            y = layer.half()(x.half())
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float16).eps
    assert (y.double() - exact).norm() / exact.norm() < 8 * eps


def test_attention_of_half_the_size_keeps_the_prefix_apart():
    layer = layer_of("recnext", num_prefix=2, half=True)
    x = torch.randn(1, 2 + 15, 16)
    y = layer(x, [3, 5])
    assert y.shape == x.shape
    with torch.no_grad():
        layer.up[1].bias.add_(1)
    moved = layer(x, [3, 5])
    assert torch.equal(moved[:, :2], y[:, :2])
    assert not torch.allclose(moved[:, 2:], y[:, 2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("vittt", {}),
        ("vittt", {"rope": True}),
        ("recnext", {"half": True}),
        ("nala", {}),
        ("polaformer_pp", {}),
        ("polaformer", {}),
    ],
)
def test_exports(mechanism, options):
    layer, x = layer_of(mechanism, **options), torch.randn(2, 24, 16)
    exported = torch.export.export(layer, (x,)).module()
    assert_close(exported(x), layer(x))

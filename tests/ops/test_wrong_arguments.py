"""Every argument of the operator with every kind of wrong value: a TypeError or ValueError that names the argument."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from tiers import slow
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from linvit.arguments import kind
from linvit.formulas.feature_map import query_and_key_map, resolve_feature_map
from linvit.formulas.normalizer import resolve_normalizer
from linvit.ops import (
    Rotary,
    State,
    attention_scores,
    linear_attention,
    linear_attention_step,
    mala,
    merge,
    rala,
    rotary_1d,
    rotary_2d,
)

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 6, 8


def draw():
    return torch.randn(3, BATCH, HEADS, TOKENS, WIDTH).unbind()


QUERY, KEY, VALUE = draw()
NO_TENSORS = {
    "nothing": None,
    "list": [1.0, 2.0],
    "nested list": QUERY.tolist(),
    "array": QUERY.numpy(),
    "text": "query",
    "whole number": 3,
    "number": 2.5,
    "NaN": float("nan"),
    "mapping": {},
    "object": object(),
    "class": torch.Tensor,
    "shape": QUERY.shape,
    "pair": (QUERY, KEY),
}
ODD_TENSORS = {
    "complex": QUERY.to(torch.complex64),
    "float8": QUERY.to(torch.float8_e4m3fn),
    "quantized": torch.quantize_per_tensor(QUERY, 0.1, 0, torch.qint8),
    "sparse": QUERY.to_sparse(),
    "compressed rows": QUERY[0, 0].to_sparse_csr(),
    "nested": torch.nested.nested_tensor([QUERY[0], KEY[0]]),
    "jagged": torch.nested.nested_tensor([QUERY[0, 0], KEY[0, 0]], layout=torch.jagged),
    "meta": QUERY.to("meta"),
    "six axes": QUERY[None, None],
    "other batch": QUERY[:1].repeat(5, 1, 1, 1),
    "other tokens": QUERY.repeat(1, 1, 3, 1),
    "no tokens": QUERY[:, :, :0],
}
NO_TOKENS = {
    "integers": QUERY.long(),
    "booleans": QUERY > 0,
    "double": QUERY.double(),
    "half": QUERY.half(),
    "zero axes": torch.tensor(1.0),
    "one axis": QUERY[0, 0, 0],
    "three axes": QUERY[0],
    "other heads": QUERY[:, :2],
    "no heads": QUERY[:, :0],
    "no width": QUERY[..., :0],
}
NO_ROTARIES = {
    "plain pair": tuple(rotary_1d(TOKENS, WIDTH)),
    "one table": (rotary_1d(TOKENS, WIDTH).cos,),
    "one": rotary_1d(TOKENS, WIDTH).cos,
    "of nothing": Rotary(None, None),
    "of lists": Rotary([1.0], [2.0]),
    "of arrays": Rotary(*(x.numpy() for x in rotary_1d(TOKENS, WIDTH))),
    "other tokens": rotary_1d(TOKENS + 1, WIDTH),
    "other width": rotary_1d(TOKENS, WIDTH + 2),
    "whole numbers": Rotary(*(x.long() for x in rotary_1d(TOKENS, WIDTH))),
    "one dtype each": Rotary(rotary_1d(TOKENS, WIDTH).cos, rotary_1d(TOKENS, WIDTH).sin.double()),
    "one shape each": Rotary(rotary_1d(TOKENS, WIDTH).cos, rotary_1d(TOKENS, WIDTH).sin[:2]),
    "meta": Rotary(*(x.to("meta") for x in rotary_1d(TOKENS, WIDTH))),
    "one axis": Rotary(*(x[0] for x in rotary_1d(TOKENS, WIDTH))),
    "other heads": Rotary(*(x.expand(5, 7, -1, -1) for x in rotary_1d(TOKENS, WIDTH))),
    "sparse": Rotary(*(x.to_sparse() for x in rotary_1d(TOKENS, WIDTH))),
}
EMPTY = State.empty(QUERY, VALUE)
NO_STATES = {
    "plain fields": tuple(EMPTY),
    "too short": tuple(EMPTY)[:3],
    "of nothing": State(*(None,) * 8),
    "of lists": State(*(x.tolist() for x in EMPTY)),
    "double": State.empty(QUERY.double(), VALUE),
    "meta": State.empty(QUERY.to("meta"), VALUE),
    "other width": State.empty(QUERY[..., :4], VALUE),
    "other heads": State.empty(QUERY[:, :2], VALUE),
    **{f"no {name}": EMPTY._replace(**{name: None}) for name in State._fields},
    **{f"other {name}": EMPTY._replace(**{name: torch.zeros(5, 5)}) for name in State._fields},
    **{f"whole {name}": EMPTY._replace(**{name: getattr(EMPTY, name).long()}) for name in State._fields},
}
NO_NAMES = {name: value for name, value in NO_TENSORS.items() if name not in ("class",)} | {
    "tensor": QUERY,
    "unknown": "elu",
    "empty": "",
    "empty pair": (),
    "three": ("elu1", "relu", "exp"),
    "half a pair": ("elu1", None),
    "pair of numbers": (1, 2),
    "returns nothing": lambda *_: None,
    "returns a number": lambda *_: 1.0,
    "returns another shape": lambda *_: torch.zeros(1, 7, 5, 3),
    "returns an array": lambda x, *_: x.numpy(),
    "returns whole numbers": lambda x, *_: x.long(),
}
NO_NUMBERS = {
    "negative": -1e-6,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "nothing": None,
    "text": "1e-6",
    "truth": True,
    "tensor": torch.tensor(1e-6),
    "complex": 1j,
    "list": [1e-6],
    "array": np.zeros(2),
}
WRONG = {
    "query": {name: x for name, x in (NO_TENSORS | ODD_TENSORS | NO_TOKENS).items() if name != "other tokens"},
    "key": NO_TENSORS | ODD_TENSORS | NO_TOKENS,
    "value": NO_TENSORS | ODD_TENSORS | NO_TOKENS,
    "key_mask": {name: x for name, x in NO_TENSORS.items() if x is not None} | ODD_TENSORS | NO_TOKENS,
    "weighting": {name: x for name, x in NO_TENSORS.items() if x is not None} | ODD_TENSORS | {"nothing": None},
    "rotary": {name: x for name, x in NO_TENSORS.items() if x is not None} | NO_ROTARIES,
    "state": {name: x for name, x in NO_TENSORS.items() if x is not None} | NO_STATES,
    "feature_map": NO_NAMES,
    "normalizer": NO_NAMES | {"pair": ("divide", "divide")},
    "eps": NO_NUMBERS,
    "causal": {name: x for name, x in NO_NUMBERS.items() if x is not True} | {"one": 1, "zero": 0},
    "backend": NO_TENSORS | {"tensor": QUERY, "unknown": "cuda", "empty": ""},
}
CALLS = {
    "plain": (linear_attention, {}),
    "causal": (linear_attention, {"causal": True}),
    "decoding": (linear_attention_step, {"state": EMPTY, "rotary": rotary_1d(TOKENS, WIDTH)}),
    "rala": (rala, {"rotary": rotary_2d((2, 3), WIDTH), "key_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool)}),
    "mala": (mala, {"backend": "torch"}),
    "scores": (attention_scores, {"weighting": torch.ones(TOKENS)}),
}
FIXED = ((rala, "weighting"), (mala, "normalizer"))


def cases():
    for call, argument in itertools.product(CALLS, WRONG):
        function, options = CALLS[call]
        known = {*inspect.signature(function).parameters}
        if function in (rala, mala):
            known |= {*inspect.signature(linear_attention).parameters}
        if (function, argument) in FIXED or argument not in known:
            continue
        yield pytest.param(function, options, argument, id=f"{call}-{argument}")


@pytest.mark.parametrize(("function", "options", "argument"), list(cases()))
def test_a_wrong_argument_is_named(function, options, argument):
    for name, wrong in WRONG[argument].items():
        given = {"query": QUERY, "key": KEY, "value": VALUE, **options}
        if function is attention_scores:
            del given["value"]
        try:
            function(**{**given, argument: wrong})
        except (TypeError, ValueError) as error:
            sentence = str(error)
        else:
            sentence = "(accepted)"
        assert f"`{argument}" in sentence, (name, sentence)
        assert "expected" in sentence, (name, sentence)
        assert len(sentence) < 400, (name, sentence)


def test_there_are_hundreds_of_cases():
    assert sum(len(WRONG[case.values[2]]) for case in cases()) > 900


@pytest.mark.parametrize("argument", ["query", "value"])
def test_an_empty_state_is_made_for_tensors(argument):
    few_axes = {name: x for name, x in NO_TOKENS.items() if "axis" in name or "zero" in name}
    odd = {name: ODD_TENSORS[name] for name in ("complex", "float8", "quantized", "sparse", "nested", "jagged")}
    for wrong in (NO_TENSORS | few_axes | odd).values():
        with pytest.raises((TypeError, ValueError), match=f"`{argument}` .*expected"):
            State.empty(**{"query": QUERY, "value": VALUE, argument: wrong})


@pytest.mark.parametrize("argument", ["first", "second"])
def test_only_equal_states_are_merged(argument):
    for wrong in (NO_TENSORS | NO_STATES).values():
        with pytest.raises((TypeError, ValueError), match=f"`{argument}.*expected"):
            merge(**{"first": EMPTY, "second": EMPTY, argument: wrong})


@pytest.mark.parametrize("wrong", [None, "6", 2.0, [6], -1, True, 10**30, float("nan"), QUERY], ids=kind)
def test_a_table_needs_whole_numbers(wrong):
    for function, options in ((rotary_1d, {"tokens": 6, "width": 8}), (rotary_2d, {"size": (2, 3), "width": 8})):
        for argument in options:
            if argument != "size":
                with pytest.raises((TypeError, ValueError), match=f"`{argument}` is .*expected"):
                    function(**{**options, argument: wrong})
    for size in (wrong, (wrong, 3), (2, wrong), (2, 3, 4), (2,)):
        with pytest.raises((TypeError, ValueError), match=r"`size` is .*expected"):
            rotary_2d(size, 8)
    with pytest.raises((TypeError, ValueError), match=r"`start` is .*expected"):
        rotary_1d(6, 8, start=wrong)


@pytest.mark.parametrize(("argument", "wrong"), [("dtype", "float32"), ("dtype", 1), ("dtype", np.float32)])
def test_a_table_needs_a_torch_dtype(argument, wrong):
    for function, first in ((rotary_1d, 6), (rotary_2d, (2, 3))):
        with pytest.raises((TypeError, ValueError), match=f"`{argument}` .*expected"):
            function(first, 8, **{argument: wrong})


def test_names_that_look_up_to_nothing_are_refused_where_layers_ask():
    for resolve in (resolve_feature_map, resolve_normalizer, lambda x: query_and_key_map(x, True)):
        for wrong in (None, 3, QUERY, QUERY.numpy(), {}, "add"):
            with pytest.raises((TypeError, ValueError), match=r"expected a function"):
                resolve(wrong)


SIZED = {"rotary": rotary_1d(TOKENS, WIDTH), "key_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool)}


@pytest.mark.parametrize("options", [*slow({"causal": True}), SIZED], ids=["causal", "sized"])
def test_checks_pass_under_vmap_fake_tensors_and_symbolic_sizes(options):
    def call(query, key, value):
        return linear_attention(query, key, value, **options)

    expected = call(QUERY, KEY, VALUE)
    stacked = torch.vmap(call)(QUERY[None], KEY[None], VALUE[None])[0]
    torch.testing.assert_close(stacked, expected)
    graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(QUERY, KEY, VALUE)
    torch.testing.assert_close(graph(QUERY, KEY, VALUE), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(*(mode.from_tensor(x) for x in (QUERY, KEY, VALUE))).shape == expected.shape


def test_integers_are_weights_and_bytes_are_masks():
    counts = torch.tensor([1, 2, 0, 1, 3, 1])
    mask = (counts > 0).expand(BATCH, -1)
    expected = linear_attention(QUERY, KEY, VALUE, weighting=counts.float(), key_mask=mask)
    given = linear_attention(QUERY, KEY, VALUE, weighting=counts, key_mask=mask.byte())
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_normalizer_may_have_parameters_of_another_dtype(dtype):
    factor = torch.tensor(0.5, dtype=dtype)

    def halved(num, den, mass, scale, eps):
        return factor.expand_as(den), factor.to(dtype) * num.to(dtype)

    for options in ({}, {"causal": True}):
        expected = linear_attention(QUERY, KEY, VALUE, normalizer="none", **options) / 2
        found = linear_attention(QUERY, KEY, VALUE, normalizer=halved, **options)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch_passes(causal):
    out = linear_attention(QUERY[:0], KEY[:0], VALUE[:0], causal=causal)
    assert out.shape == (0, HEADS, TOKENS, WIDTH)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_any_of_the_tensors_may_want_a_gradient(wanted):
    tensors = [x.clone().requires_grad_(wants) for x, wants in zip(draw(), wanted, strict=True)]
    out = linear_attention(*tensors)
    assert out.requires_grad == any(wanted)

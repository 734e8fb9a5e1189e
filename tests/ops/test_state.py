import pytest
import torch

from linvit.formulas.feature_map import elu1
from linvit.formulas.normalizer import magnitude
from linvit.ops import State, linear_attention, linear_attention_step, merge, rotary_1d
from linvit.ops.position import rotate
from linvit.ops.state import Weights, read, summarize

float64 = torch.float64


def draw(tokens=30, dtype=float64):
    key = elu1(torch.randn(2, 3, tokens, 8, dtype=dtype))
    rotated = rotate(key, rotary_1d(tokens, 8, dtype=dtype))
    value = torch.randn(2, 3, tokens, 5, dtype=dtype) + 3
    factor = (torch.rand(2, 3, tokens) > 0.2).to(dtype)
    exponent = 40 * torch.randn(2, 3, tokens, dtype=dtype)
    return key, rotated, value, factor, exponent


def part(draws, kind, tokens):
    key, rotated, value, factor, exponent = (x[:, :, tokens] for x in draws)
    weights = {"uniform": Weights(), "masked": Weights(factor), "exponent": Weights(factor, exponent)}[kind]
    return summarize(key, rotated, value, weights)


def assert_same(a, b):
    for name, x, y in zip(State._fields, a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["uniform", "masked", "exponent"])
@pytest.mark.parametrize("cut", [1, 13, 29])
def test_merging_any_split_gives_the_whole(kind, cut):
    draws = draw()
    whole = part(draws, kind, slice(None))
    first, second = part(draws, kind, slice(cut)), part(draws, kind, slice(cut, None))
    assert_same(merge(first, second), whole)
    assert_same(merge(second, first), whole)


def test_merge_is_associative():
    draws = draw()
    a, b, c = (part(draws, "exponent", s) for s in (slice(0, 4), slice(4, 17), slice(17, None)))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_empty_state_is_neutral():
    key, _, value, *_ = draws = draw()
    state = part(draws, "exponent", slice(None))
    assert_same(merge(State.empty(key, value), state), state)
    assert_same(merge(state, State.empty(key, value)), state)


def test_what_outweighs_the_rest_is_all_that_is_left():
    key, rotated, value, factor, _ = draw(2)
    key[:, :, 1] *= 1e-12
    light, heavy = (
        summarize(
            *(x[:, :, i : i + 1] for x in (key, rotated, value)), Weights(None, torch.full_like(factor[..., :1], e))
        )
        for i, e in enumerate((0.0, 200.0))
    )
    for state in (merge(light, heavy), merge(heavy, light)):
        torch.testing.assert_close(state.z, key[:, :, 1], rtol=1e-14, atol=0)


def test_fields_are_the_means_of_the_formula():
    key, rotated, value, factor, _ = draws = draw()
    state = part(draws, "masked", slice(None))
    alpha = (factor / factor.sum(-1, keepdim=True)).unsqueeze(-1)
    torch.testing.assert_close(state.z, (alpha * key).sum(-2))
    torch.testing.assert_close(state.r, (alpha * rotated).sum(-2))
    torch.testing.assert_close(state.u, (alpha * value).sum(-2))
    torch.testing.assert_close(state.n, factor.sum(-1))
    raw = (alpha * rotated).mT @ value
    torch.testing.assert_close(state.S + state.r.unsqueeze(-1) * state.u.unsqueeze(-2), raw)


def test_all_masked_reads_zeros():
    key, rotated, value, factor, exponent = draw()
    for weights in (Weights(torch.zeros_like(factor)), Weights(torch.zeros_like(factor), exponent)):
        state = summarize(key, rotated, value, weights)
        assert all(field.eq(0).all() for name, field in state._asdict().items() if name != "shift")
        assert read(state, key, rotated, magnitude, 1e-6).eq(0).all()


def sums_in_float32(q, k, v):
    """MALA at the last token from raw sums, as a decoder would keep them."""
    S, z, u = torch.zeros(64, 64), torch.zeros(64), torch.zeros(64)
    for key, value in zip(k, v, strict=True):
        S, z, u = S + key[:, None] * value, z + key, u + value
    n, s = len(k), 64**-0.5
    num, den = q @ S / n, q @ z / n
    return s * num * (1 + 1 / (s * den + 1e-6)) - s * den * u / n


def test_decoding_keeps_its_precision_where_raw_sums_lose_it():
    tokens = 2048
    q, k = (torch.randn(1, 1, tokens, 64, dtype=float64) for _ in range(2))
    v = torch.randn(1, 1, tokens, 64, dtype=float64) + 3
    exact = linear_attention(q, k, v, normalizer="magnitude")[0, 0, -1]
    q32, k32, v32 = q.float(), k.float(), v.float()
    state = None
    for t in range(tokens):
        now = [x[:, :, t : t + 1] for x in (q32, k32, v32)]
        out, state = linear_attention_step(*now, state, normalizer="magnitude")
    error = (out[0, 0, 0] - exact).norm() / exact.norm()
    raw = sums_in_float32(elu1(q32[0, 0, -1]), elu1(k32[0, 0]), v32[0, 0])
    raw_error = (raw - exact).norm() / exact.norm()
    assert error < raw_error / 3
    assert error < 2e-6

import math

import pytest
import torch

from linvit.formulas.feature_map import resolve_feature_map
from linvit.ops import linear_attention


def test_values_at_known_points():
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected = {
        "elu1": [math.exp(-1), 1.0, 3.0],
        "relu": [0.0, 0.0, 2.0],
        "exp": [math.exp(-1), 1.0, math.exp(2)],
        "identity": [-1.0, 0.0, 2.0],
        "unit": [-1 / math.sqrt(5), 0.0, 2 / math.sqrt(5)],
        "norm_power": [0.0, 0.0, 1.0],
        "relu_cubed": [0.0, 0.0, 8.0],
        "relu_expm1": [0.0, 0.0, math.exp(2) - 1],
        "softmax": [math.exp(n) / (math.exp(-1) + 1 + math.exp(2)) for n in (-1, 0, 2)],
    }
    for name, values in expected.items():
        torch.testing.assert_close(resolve_feature_map(name)(x), torch.tensor(values, dtype=torch.float64))


def test_norm_power_is_the_share_of_a_token_to_a_power_of_its_own():
    x = torch.tensor([[3.0, -1.0, 4.0], [0.03, 0.04, 0.0]], dtype=torch.float64)
    powers = [3 * (0.5 + math.tanh(norm)) for norm in (5.0, 0.05)]
    expected = [[0.6 ** powers[0], 0.0, 0.8 ** powers[0]], [0.6 ** powers[1], 0.8 ** powers[1], 0.0]]
    torch.testing.assert_close(resolve_feature_map("norm_power")(x), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_power_of_zeros_and_of_tiny_numbers_has_derivatives(dtype):
    x = torch.zeros(3, 4, dtype=dtype)
    x[1] = torch.tensor([0, 1e-30, -1e-30, 2e-30])
    x[2] = torch.tensor([0, 1e4, -1e4, 1e-4])
    x.requires_grad_()
    y = resolve_feature_map("norm_power")(x)
    y.sum().backward()
    assert y[0].eq(0).all()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert x.grad[0].eq(0).all()


def test_channels_of_all_heads_have_one_norm():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    together = resolve_feature_map("unit_channels")(x).transpose(1, 2).flatten(2)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(2, 5, dtype=torch.float64))
    torch.testing.assert_close(
        together / x.transpose(1, 2).flatten(2), 1 / x.norm(dim=(1, 3)).unsqueeze(-1).expand(2, 5, 12)
    )


def test_softmax_over_tokens_sums_to_one_there():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(
        resolve_feature_map("softmax_tokens")(x).sum(2), torch.ones(2, 3, 4, dtype=torch.float64)
    )


def test_focused_cubes_the_direction_and_keeps_the_norm():
    x = torch.rand(2, 3, 5, 4, dtype=torch.float64)
    y = resolve_feature_map("focused")(x)
    torch.testing.assert_close(y.norm(dim=(1, 3)), (x + 1e-6).norm(dim=(1, 3)))
    torch.testing.assert_close(y / y[:, :1, :, :1], ((x + 1e-6) / (x + 1e-6)[:, :1, :, :1]) ** 3)


@pytest.mark.parametrize("options", [{"causal": True}, {"key_mask": torch.ones(1, 4, dtype=torch.bool)}])
def test_maps_across_tokens_refuse_what_hides_tokens(options):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"softmax_tokens.*use an elementwise one"):
        linear_attention(x, x, x, feature_map=("softmax", "softmax_tokens"), **options)


def test_a_function_is_a_feature_map_if_it_keeps_the_form():
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(resolve_feature_map(torch.tanh)(x), x.tanh())
    with pytest.raises(
        ValueError, match=r"`feature_map\(x\)` is torch.float32 of shape \(1, 2, 3, 2\).*\(1, 2, 3, 4\)"
    ):
        resolve_feature_map(lambda x: x[..., :2])(x)

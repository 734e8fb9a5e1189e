import math

import pytest
import torch

from linvit.ops.feature_map import FEATURE_MAPS, resolve_feature_map


def test_values_at_known_points():
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    expected = {
        "elu1": [math.exp(-1), 1.0, 3.0],
        "relu": [0.0, 0.0, 2.0],
        "exp": [math.exp(-1), 1.0, math.exp(2)],
        "identity": [-1.0, 0.0, 2.0],
    }
    assert expected.keys() == FEATURE_MAPS.keys()
    for name, values in expected.items():
        torch.testing.assert_close(resolve_feature_map(name)(x), torch.tensor(values, dtype=torch.float64))


def test_callable_is_returned_unchanged():
    assert resolve_feature_map(torch.tanh) is torch.tanh


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'elu', .*elu1, relu, exp, identity"):
        resolve_feature_map("elu")

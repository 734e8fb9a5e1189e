"""What refuses a speed."""

import pytest
import torch

from linvit.bench.exactness import WrongResultError, check, relative_error


def test_error_is_relative():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected + torch.tensor([0.0, 0.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.tensor([3.0, float("nan")]), expected) == float("inf")
    assert relative_error(torch.zeros(3), expected) == float("inf")


def test_the_largest_error_counts_and_is_named():
    good, bad = torch.ones(3), torch.full((3,), 1.01)
    assert check("a", [good, good], [good, good], 1e-5) == 0
    with pytest.raises(WrongResultError, match=r"fast one computes a wrong result: its relative error is 1\.0e-02"):
        check("fast one", [good, bad], [good, good], 1e-5)

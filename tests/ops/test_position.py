import pytest
import torch

from linvit.ops import rotary_1d, rotary_2d
from linvit.ops.position import rotate


def test_rotation_keeps_norms():
    x = torch.randn(2, 3, 35, 16, dtype=torch.float64)
    turned = rotate(x, rotary_2d((5, 7), 16, dtype=torch.float64))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_products_depend_on_the_distance_alone():
    rotary = rotary_1d(20, 8, dtype=torch.float64)
    q, k = (torch.randn(8, dtype=torch.float64).expand(20, 8) for _ in range(2))
    product = rotate(q, rotary) @ rotate(k, rotary).T
    torch.testing.assert_close(product[3, 5], product[13, 15])
    assert (product[3, 5] - product[3, 6]).abs() > 1e-3


def test_first_half_turns_with_the_row_and_second_with_the_column():
    height, width = 5, 7
    x = torch.randn(1, 12, dtype=torch.float64).expand(height * width, 12)
    grid = rotate(x, rotary_2d((height, width), 12, dtype=torch.float64)).reshape(height, width, 12)
    torch.testing.assert_close(grid[:, 0, :6], grid[:, 4, :6])
    torch.testing.assert_close(grid[0, :, 6:], grid[3, :, 6:])
    assert not torch.allclose(grid[0, 0, :6], grid[1, 0, :6])
    assert not torch.allclose(grid[0, 0, 6:], grid[0, 1, 6:])


def test_table_follows_the_released_frequencies():
    rotary = rotary_2d((3, 4), 16, dtype=torch.float64)
    frequencies = [10000 ** -(i / 3) for i in range(4)]
    token = 2 * 4 + 3  # row 2, column 3
    expected = torch.tensor([2 * f for f in frequencies] + [3 * f for f in frequencies], dtype=torch.float64)
    torch.testing.assert_close(rotary.cos[token], expected.cos())
    torch.testing.assert_close(rotary.sin[token], expected.sin())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tables_are_float32_and_right_at_side_512(dtype):
    exact = rotary_2d((512, 512), 64, dtype=torch.float64)
    table = rotary_2d((512, 512), 64, dtype=dtype)
    assert table.sin.dtype == torch.float32
    assert (table.sin - exact.sin).abs().max() < 1e-4
    assert rotate(torch.ones(512 * 512, 64, dtype=dtype), table).dtype == dtype


def test_start_continues_a_sequence():
    whole = rotary_1d(9, 6)
    torch.testing.assert_close(rotary_1d(4, 6, start=5).cos, whole.cos[5:])


def test_first_row_continues_a_grid():
    whole = rotary_2d((7, 3), 8, dtype=torch.float64)
    rows = rotary_2d((2, 3), 8, first_row=4, dtype=torch.float64)
    for table, some in zip(whole, rows, strict=True):
        assert torch.equal(table.unflatten(0, (7, 3))[4:6].flatten(0, 1), some)


def test_widths_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="`width` is 7, expected a multiple of 2"):
        rotary_1d(4, 7)
    with pytest.raises(ValueError, match="`width` is 6, expected a multiple of 4"):
        rotary_2d((2, 2), 6)


def test_each_sequence_has_a_start_of_its_own():
    tables = rotary_1d(5, 8, start=torch.tensor([0.0, 7.0]), dtype=torch.float64)
    for sequence, start in enumerate((0, 7)):
        expected = rotary_1d(5, 8, start=start, dtype=torch.float64)
        assert torch.equal(tables.cos[sequence, 0], expected.cos)
        assert torch.equal(tables.sin[sequence, 0], expected.sin)
    with pytest.raises(ValueError, match=r"`start` is a tensor \(2, 1\), expected"):
        rotary_1d(5, 8, start=torch.zeros(2, 1))

import shutil
from math import cos, sin

import pytest
import torch

from linvit.kernels import cpu
from linvit.ops import Rotary, attention_scores, linear_attention, rotary_1d, rotary_2d, rotary_3d
from linvit.ops.position import rotate

FORMULA = {"weighting": "query_mean", "normalizer": "magnitude", "feature_map": "elu1"}


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


def turned_token_by_token(x, size, widths, endpoint):
    """Channels turned in pairs by the angle of their axis, pair by pair as complex numbers."""
    turned = x.clone()
    for token in range(x.shape[-2]):
        frame, rest = divmod(token, size[1] * size[2])
        pair = 0
        for index, width in zip((frame, *divmod(rest, size[2])), widths, strict=True):
            pairs = width // 2
            for i in range(pairs):
                angle = index * 10000 ** -(i / (pairs - 1 if endpoint else pairs))
                number = torch.view_as_complex(x[..., token, 2 * pair : 2 * pair + 2].contiguous())
                turned[..., token, 2 * pair : 2 * pair + 2] = torch.view_as_real(
                    number * complex(cos(angle), sin(angle))
                )
                pair += 1
    return turned


@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize(("width", "widths"), [(64, (24, 20, 20)), (12, (4, 4, 4)), ((4, 8, 6), (4, 8, 6))])
def test_a_video_turns_with_frame_row_and_column(width, widths, endpoint):
    size = (2, 5, 3)
    query, key, value = torch.randn(3, 1, 2, 30, sum(widths), dtype=torch.float64)
    rotary = rotary_3d(size, width, endpoint=endpoint, dtype=torch.float64)
    q, k = (turned_token_by_token(x, size, widths, endpoint) for x in (query, key))
    torch.testing.assert_close(rotate(query, rotary), q)
    scores = attention_scores(query, key, feature_map="identity", normalizer="none", rotary=rotary)
    torch.testing.assert_close(scores, q @ k.mT / 30)
    expected = attention_scores(query, key, rotary=rotary, **FORMULA) @ value
    torch.testing.assert_close(linear_attention(query, key, value, rotary=rotary, **FORMULA), expected)


@pytest.fixture
def kernel():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
def test_the_cpu_kernel_turns_a_video(kernel):
    query, key, value = torch.randn(3, 1, 2, 30, 64)
    exact = rotary_3d((2, 5, 3), 64, dtype=torch.float64)
    found = linear_attention(query, key, value, rotary=Rotary(*(x.float() for x in exact)), backend="cpp", **FORMULA)
    expected = attention_scores(query.double(), key.double(), rotary=exact, **FORMULA) @ value.double()
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_first_frame_continues_a_video():
    whole, piece = rotary_3d((7, 2, 3), 8), rotary_3d((2, 2, 3), 8, first_frame=4)
    for table, some in zip(whole, piece, strict=True):
        assert torch.equal(table.unflatten(0, (7, 6))[4:6].flatten(0, 1), some)


@pytest.mark.parametrize(
    ("size", "options", "fault"),
    [
        ((2, 3), {}, r"`size` is .*expected a list of 3 whole numbers"),
        ((2, -1, 3), {}, r"`size` is .*expected a list of 3 whole numbers"),
        ((2, 5, 3), {"width": 4}, "`width` is 4, expected a whole number from 6 to"),
        ((2, 5, 3), {"width": 9}, "`width` is 9, expected a multiple of 2"),
        ((2, 5, 3), {"width": (4, 3, 5)}, r"`width` is \(4, 3, 5\), expected multiples of 2"),
        ((2, 5, 3), {"width": (4, 4)}, r"`width` is .*expected .* a list of 3 whole numbers"),
        ((2, 5, 3), {"first_frame": -1}, "`first_frame` is -1, expected a whole number from 0 to"),
        ((2, 5, 3), {"dtype": "float32"}, "`dtype` is .*expected a torch.dtype"),
        ((2, 5, 3), {"device": "nowhere"}, "`device` is 'nowhere', expected a device of torch"),
    ],
)
def test_a_video_needs_three_sizes_and_widths_in_pairs(size, options, fault):
    with pytest.raises((TypeError, ValueError), match=fault):
        rotary_3d(size, **{"width": 8, **options})

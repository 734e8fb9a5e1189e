import pytest
import torch
from published_mechanisms import WRITTEN_OUT
from torch.testing import assert_close

from linvit.layers.attention import MODULATIONS
from linvit.layers.grid import CurrentGrid
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.token_attention import GatedAttention, TokenAttention
from linvit.layers.token_mechanisms import TOKEN_LAYERS

CHANNELS, HEADS = 16, 2
MADE_FOR = (4, 6)
SCORED = sorted(name for name, entry in MECHANISMS.items() if not entry.nonlinear)
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=sorted(MECHANISMS))
def mechanism(request):
    return request.param


def made(mechanism, grid=MADE_FOR, num_prefix=0, **options):
    """A layer in which every parameter is drawn, so that an error in any branch shows."""
    if mechanism == "agent":
        options = {"agents": (2, 3), **options}
    layer = TOKEN_LAYERS[mechanism](CHANNELS, HEADS, mechanism, grid, num_prefix, **options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, buffer in layer.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.5)
    return layer


def tokens(grid, num_prefix=0, batch=2):
    generator = torch.Generator().manual_seed(2)
    size = (batch, num_prefix + grid[0] * grid[1], CHANNELS)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def read(layer, x, grid):
    """The values that the operator reads, its output, and that of the layer."""
    seen = []
    handle = layer.operator.register_forward_hook(lambda _, inputs, output: seen.append((inputs[2], output)))
    y = layer(x, grid)
    handle.remove()
    return *seen[0], y


def test_every_mechanism_is_written_out():
    assert set(WRITTEN_OUT) == set(MECHANISMS)


@pytest.mark.parametrize("num_prefix", [0, 1, 3])
def test_equals_the_published_formula(mechanism, num_prefix):
    layer, x = made(mechanism, num_prefix=num_prefix), tokens(MADE_FOR, num_prefix)
    mixed = WRITTEN_OUT[mechanism](layer, x, MADE_FOR)
    weight = torch.cat([each.weight for each in layer.output_layers()], dim=1)
    assert_close(layer(x), mixed @ weight.T + layer.proj.bias)


GRIDS = ((7, 7), (14, 9), (1, 5), (5, 1), (1, 1))
READ = [(mechanism, grid, 1) for mechanism in SCORED for grid in GRIDS[1:3]]
READ += [(mechanism, grid, prefix) for mechanism in ("agent", "mala") for grid in GRIDS for prefix in (0, 1)]


@pytest.mark.parametrize(("mechanism", "grid", "num_prefix"), READ)
def test_scores_times_value_is_the_output(mechanism, grid, num_prefix):
    layer, x = made(mechanism, num_prefix=num_prefix), tokens(grid, num_prefix)
    number = num_prefix + grid[0] * grid[1]
    value, mixed, y = read(layer, x, grid)
    scores = layer.scores(x, grid)
    assert scores.shape == (*value.shape[:2], number, number)
    assert_close(scores @ value, mixed)
    layer.operator.fused = False
    assert_close(read(layer, x, grid)[1], mixed)
    assert y.shape == x.shape
    assert y.isfinite().all()


@pytest.mark.parametrize("grid", [MADE_FOR, (3, 7)])
def test_every_parameter_gets_a_gradient(mechanism, grid):
    layer = made(mechanism, num_prefix=1)
    layer(tokens(grid, 1), grid).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close(mechanism, dtype):
    layer, x = made(mechanism, num_prefix=1), tokens(MADE_FOR, 1)
    layer, x = layer.to(dtype), x.to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    expected = layer.double()(x.double())
    # Four steps follow one another (qkv, operator, local or gate, proj); sums of 16 terms and cubes widen each by 8.
    assert (y.double() - expected).norm() / expected.norm() < 4 * 8 * torch.finfo(dtype).eps


def test_height_and_width_are_not_exchanged(mechanism):
    """A 4 × 6 grid is not a 6 × 4 grid, wherever positions matter at all."""
    layer, x = made(mechanism), tokens(MADE_FOR)
    same = torch.allclose(layer(x, (4, 6)), layer(x, (6, 4)))
    blind = {"softmax", "softmax_unit_query", "linear", "linear_relu", "linear_exp", "hydra", "efficient", "enhanced"}
    assert same == (mechanism in blind | {"linear_angular"})  # whose convolution runs along the row of tokens


@pytest.mark.parametrize("mechanism", ["linear", "rala"])
def test_a_grid_is_told_or_found(mechanism):
    source = CurrentGrid()
    layer, x = made(mechanism, source=source), tokens((3, 8))
    with pytest.raises(ValueError, match=r"got 21 tokens, expected 0 \+ 4 × 6"):
        layer(tokens((3, 7)))
    source.note((3, 8))
    assert torch.equal(layer(x), layer(x, [3, 8]))
    assert layer.last_grid.size == (3, 8)


def test_masks_are_refused(mechanism):
    layer, x = made(mechanism), tokens(MADE_FOR)
    for refused in ({"attn_mask": torch.ones(1)}, {"is_causal": True}):
        with pytest.raises(ValueError, match="attention got a mask, expected none"):
            layer(x, **refused)


@pytest.mark.parametrize("modulation", MODULATIONS)
def test_modulation(modulation):
    layer, x = made("rala", modulation=modulation, lepe=False), tokens(MADE_FOR)
    mixed = read(layer, x, MADE_FOR)[1].transpose(1, 2).flatten(2)
    if modulation in ("linear", "tanh", "silu"):
        gate = x @ layer.modulation.weight.T + layer.modulation.bias
    else:
        assert layer.modulation is None
        gate = x
    gates = {"tanh": gate.tanh(), "silu": gate * gate.sigmoid(), "none": torch.ones_like(gate)}
    gate = gates.get(modulation, gate)
    assert_close(layer(x), layer.proj(mixed * gate))


def test_without_rotation_and_local_term_no_position_matters():
    layer, x = made("mala", rope=False, lepe=False), tokens(MADE_FOR)
    order = torch.randperm(24)
    assert_close(layer(x[:, order]), layer(x)[:, order])
    turned = made("mala", lepe=False)
    assert not torch.allclose(turned(x[:, order]), turned(x)[:, order])


def test_unknown_modulation_and_head_width():
    with pytest.raises(
        ValueError, match="`modulation` is 'sigmoid', expected one of linear, tanh, silu, identity, none"
    ):
        made("rala", modulation="sigmoid")
    with pytest.raises(ValueError, match="head width is 6, expected a multiple of 4 for RoPE"):
        GatedAttention(12, 2, "rala", MADE_FOR)
    assert GatedAttention(12, 2, "rala", MADE_FOR, rope=False).rope is False


def test_projections_are_timms():
    layer = TokenAttention(CHANNELS, HEADS, "linear", MADE_FOR, qkv_bias=False, proj_bias=False, proj_drop=0.5)
    assert {name for name, _ in layer.named_parameters()} == {"qkv.weight", "proj.weight"}
    assert layer.proj_drop.p == 0.5

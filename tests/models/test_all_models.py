"""What must hold for every registered model; a small network of each family stands for it where a forward is needed."""

import math

import pytest
import timm
import torch
from torch.export import Dim, export
from torch.testing import assert_close

import linvit.models  # noqa: F401  (registers them)

FAMILIES = ("ravlt", "mavit", "care")
NAMES = timm.list_models([f"{family}_*" for family in FAMILIES])
NANOS = [f"{family}_nano" for family in FAMILIES]
SMALL = {
    "hvittt_tiny": {"widths": (16, 32, 32, 48), "depths": (1, 2, 1, 1), "heads": (2, 4, 2, 3)},
    "nalaformer_tiny": {"widths": (16, 24, 32, 48), "depths": (1, 1, 2, 1), "heads": (2, 3, 4, 6), "final_width": 40},
}
"""Small networks of the families without a nano."""
EVERY = [*NANOS, *SMALL]
SIZES = [(64, 96), (45, 70)]  # the second is a multiple of nothing

PARAMETERS = {
    "ravlt_nano": 524_080,
    "ravlt_tiny": 14_897_768,
    "ravlt_small": 25_591_208,
    "ravlt_base": 48_241_288,
    "ravlt_large": 95_242_440,
    "mavit_nano": 524_080,
    "mavit_tiny": 16_449_128,
    "mavit_small": 27_142_568,
    "mavit_base": 49_792_648,
    "mavit_large": 97_766_088,
    "care_nano": 1_173_404,
    "care_s0": 7_340_000,
    "care_s1": 9_602_424,
    "care_s2": 19_481_288,
}


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL.get(name, {}), **kwargs}).eval()


def image(height, width, batch=2, seed=0):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


def visible(model):
    """Give the layer scales and norms weights at which an error in any branch shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))
    return model


def test_the_registry_holds_every_size_and_its_linear_twin():
    linear = {f"{family}_{size}_linear" for family in FAMILIES[:2] for size in ("tiny", "small", "base", "large")}
    assert set(NAMES) == set(PARAMETERS) | linear


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_pattern(name):
    model = timm.create_model(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name.removesuffix("_linear")]
    linear = name.endswith("_linear") or name in ("ravlt_nano", "mavit_nano")
    assert model.pattern == ("CCLL" if name.startswith("care") else "LLLL" if linear else "LLSS")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_gets_a_gradient(name, size):
    model = create(name, num_classes=5).train()
    logits = model(image(*size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.count_nonzero(), key


@pytest.mark.parametrize("size", [(32, 32), *SIZES])
@pytest.mark.parametrize("name", EVERY)
def test_features_have_the_declared_channels_and_strides(name, size):
    model = create(name, features_only=True)
    round_side = math.floor if name.startswith("care") else math.ceil
    for channels, stride, feature in zip(
        model.feature_info.channels(), model.feature_info.reduction(), model(image(*size)), strict=True
    ):
        assert feature.shape == (2, channels, *(round_side(side / stride) for side in size))


@pytest.mark.parametrize("name", EVERY)
def test_channels_last_gives_the_same_and_stays_channels_last(name):
    model, x = visible(create(name)).double(), image(70, 110).double()
    _, expected = model.forward_intermediates(x)
    assert all(feature.is_contiguous() for feature in expected)
    _, features = model.forward_intermediates(x.contiguous(memory_format=torch.channels_last))
    assert all(feature.is_contiguous(memory_format=torch.channels_last) for feature in features)
    for feature, other in zip(features, expected, strict=True):
        assert_close(feature, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NANOS)
def test_half_precision_stays_close(name, dtype):
    model, x = visible(create(name)), image(64, 96)
    expected = model(x)
    logits = model.to(dtype)(x.to(dtype))
    assert logits.dtype == dtype
    # Rounding of every layer adds up over about 60 of them, each at half a unit of the dtype.
    assert (logits.float() - expected).norm() / expected.norm() < 60 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", EVERY)
def test_images_of_a_batch_do_not_meet(name):
    model, x = visible(create(name)).double(), image(45, 70, batch=3).double()
    assert_close(model(x), torch.cat([model(one[None]) for one in x]))


@pytest.mark.parametrize("name", NANOS)
def test_every_pixel_reaches_the_logits(name):
    model, x = visible(create(name)).double(), image(64, 64, batch=1).double()
    x.requires_grad_()
    model(x).square().sum().backward()
    assert x.grad.ne(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_exports_with_dynamic_sides(name):
    # Sides from 64 px: at 32 px the last map has one position, and export treats sizes of one as constants.
    model = visible(create(name))
    sides = {2: Dim("height", min=64, max=1024), 3: Dim("width", min=64, max=1024)}
    program = export(model, (image(96, 128),), dynamic_shapes={"x": {0: Dim("batch", max=64), **sides}}).module()
    for batch, height, width in ((1, 64, 80), (3, 131, 70)):
        x = image(height, width, batch)
        assert_close(program(x), model(x))


def test_the_same_body_with_softmax_attention():
    linear, softmax = create("ravlt_nano"), create("ravlt_nano", pattern="SSSS")
    softmax.load_state_dict(linear.state_dict())
    assert {block.attn.operator.mechanism for stage in softmax.stages for block in stage.blocks} == {"softmax"}
    assert not torch.allclose(visible(linear)(image(64, 64)), visible(softmax)(image(64, 64)))


@pytest.mark.parametrize("name", NANOS)
def test_shapes_can_be_had_on_the_meta_device(name):
    model = timm.create_model(name, device="meta").eval()
    assert model(torch.empty(2, 3, 96, 64, device="meta")).shape == (2, 1000)

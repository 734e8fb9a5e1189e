"""The released order of operations against the operator, in float64."""

import pytest
import timm
import torch
from fused_networks import error, images, randomised
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import linvit
from linvit.bench.reference import REFERENCES, reference_model, wide_tables
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import linear_attention, position, rotary_2d


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_equals_the_operator(name, rotated):
    query, key, value = torch.randn(3, 2, 3, 63, 16, dtype=torch.float64)
    rotary = rotary_2d((7, 9), 16, dtype=torch.float64) if rotated else None
    got = REFERENCES[name](query, key, value, wide_tables(rotary) if rotated else None)
    if name == "softmax":
        turned = (position.rotate(x, rotary) if rotated else x for x in (query, key))
        expected = scaled_dot_product_attention(*turned, value)
    else:
        expected = linear_attention(query, key, value, rotary=rotary, **LINEAR_AXES[name])
    assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano", "care_nano"])
@pytest.mark.parametrize("last", ["L", "S"])
def test_networks_stay_the_same(name, last):
    options = {} if name == "care_nano" else {"pattern": f"LLL{last}"}
    model = randomised(timm.create_model(name, num_classes=7, **options)).double()
    twin = reference_model(model)
    assert set(twin.state_dict()) == set(model.state_dict())
    with torch.inference_mode():
        for size in ((45, 70), (70, 45)):  # another image: the tables are recomputed
            x = images(*size).double()
            assert error(twin(x), model(x)) < 1e-10


def test_maps_keep_the_memory_format_of_the_images():
    model = timm.create_model("care_nano").eval()
    with torch.no_grad():
        assert not model.stem(images(32, 32)).is_contiguous()
        assert reference_model(model).stem(images(32, 32)).is_contiguous()


def test_gradients_are_the_same():
    model = randomised(timm.create_model("ravlt_nano", num_classes=3)).double()
    twin, x = reference_model(model), images(32, 48).double()
    for network in (model, twin):
        network(x).square().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(other.grad, own.grad, rtol=1e-9, atol=1e-10)


def test_what_has_no_released_order_is_refused():
    with pytest.raises(ValueError, match="no attention of ours"):
        reference_model(timm.create_model("resnet10t"))
    with pytest.raises(ValueError, match=r"'mala' with .*'exp'"):
        reference_model(timm.create_model("mavit_nano", attention={"feature_map": "exp"}))
    model = linvit.swap_attention(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "inline")
    with pytest.raises(ValueError, match="'inline'"):
        reference_model(model)

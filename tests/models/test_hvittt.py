"""H-ViT³: sizes, the released network, any image, what refuses its nonlinear read."""

import json

import pytest
import timm
import torch
from fused_networks import error, randomised
from golden_networks import FOLDER, filled, released_input
from tiers import slow
from torch.testing import assert_close

import linvit
from linvit.analysis.cost import count_cost
from linvit.streaming import run_in_strips

SMALL = {"widths": (16, 32, 32, 48), "depths": (1, 2, 1, 1), "heads": (2, 4, 2, 3), "num_classes": 5}
# Parameters in millions and G of MACs of the released networks, whose counter leaves out the products of the kernel's
# gradient, 9 × tokens × head width in each block.
RELEASED = {"hvittt_tiny": (28.70, 4.903), "hvittt_small": (54.36, 8.732), "hvittt_base": (94.37, 16.68)}


def small(**options):
    torch.manual_seed(0)
    return randomised(timm.create_model("hvittt_tiny", **{**SMALL, **options})).eval()


def image(height=45, width=70):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_every_size_is_registered():
    assert set(timm.list_models("hvittt_*")) == set(RELEASED)


@pytest.mark.parametrize("name", slow(*RELEASED))
def test_sizes_are_those_measured_on_the_authors_networks(name):
    model = timm.create_model(name, device="meta")
    cost = count_cost(model, (3, 224, 224))
    parameters, macs = RELEASED[name]
    kernels = sum(
        9 * (56 // 2**i) ** 2 * block.attn.operator.head_width for i, s in enumerate(model.stages) for block in s.blocks
    )
    assert f"{cost.parameters / 1e6:.4g}" == f"{parameters:.4g}"
    assert f"{(cost.macs + cost.macs_attention - kernels) / 1e9:.4g}" == f"{macs:.4g}"
    assert model.pattern == "LLLL"


def test_equals_the_released_network():
    """On a map of 16 × 24; the released code ran with these weights under its own names."""
    record = json.loads((FOLDER / "HViTTT.json").read_text())
    model = timm.create_model("hvittt_tiny", **record["arguments"]).double().eval()
    shapes = [(key, value.shape) for key, value in model.state_dict().items() if value.ndim]
    model.load_state_dict(filled(shapes), strict=False)
    with torch.no_grad():
        logits = model(released_input(record))
    assert_close(logits, torch.tensor(record["logits"], dtype=torch.float64), rtol=0, atol=1e-12)


def test_every_parameter_gets_a_gradient_at_any_size():
    model = small().double().train()
    logits = model(image().double())
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.count_nonzero(), key


def test_features_have_the_declared_channels_and_strides():
    model = timm.create_model("hvittt_tiny", features_only=True, **SMALL)
    for feature, channels, stride in zip(
        model(image()), model.feature_info.channels(), model.feature_info.reduction(), strict=True
    ):
        assert feature.shape == (2, channels, -(-45 // stride), -(-70 // stride))


def test_images_of_a_batch_do_not_meet_and_fusing_keeps_the_result():
    model, x = small().double(), image().double()
    assert_close(model(x), torch.cat([model(one[None]) for one in x]))
    with torch.inference_mode():
        assert error(linvit.fuse(model)(x), model(x)) < 1e-10


def test_channels_last_gives_the_same():
    model, x = small().double(), image().double()
    assert_close(model(x.contiguous(memory_format=torch.channels_last)), model(x))


def test_the_classifier_at_every_position_and_another_one():
    model, x = small(global_pool=""), image()
    assert model(x).shape == (2, 5, 2, 3)
    assert_close(model(x).mean((2, 3)), small()(x))
    model.reset_classifier(7, "avg")
    assert model(x).shape == (2, 7)


@pytest.mark.slow
def test_checkpointed_gradients_are_the_same():
    model, x = small().double().train(), image().double()
    model(x).square().sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model = small().double().train()
    model.set_grad_checkpointing()
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[key])


def test_what_needs_linear_attention_refuses_it():
    model = small()
    with pytest.raises(ValueError, match=r"stages\.0\.blocks\.0\.attn\.operator reads its values nonlinearly"):
        run_in_strips(model, image())
    with pytest.raises(ValueError, match="`model` is a HViTTT without softmax attention that we know"):
        linvit.linearize(model, "mala")


def test_weights_with_our_names_are_read():
    model, other = small(), small()
    with torch.no_grad():
        other.head.fc.bias.zero_()
    linvit.load_released(other, {"model": {f"module.{key}": value for key, value in model.state_dict().items()}})
    assert torch.equal(other(image()), model(image()))
    with pytest.raises(ValueError, match="does not fit this HViTTT"):
        linvit.load_released(other, {"patch_embed.conv.0.conv.weight": torch.zeros(1)})


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`width` is 16 and `heads` 3, expected a multiple"):
        timm.create_model("hvittt_tiny", **{**SMALL, "heads": (3, 4, 2, 3)})
    with pytest.raises(ValueError, match="`depths` is"):
        timm.create_model("hvittt_tiny", **{**SMALL, "depths": (1, 2)})


@pytest.mark.slow
def test_compiles_and_exports():
    model, x = small(depths=(1, 1, 1, 1)), image()
    assert_close(torch.compile(model, fullgraph=True, backend="eager", dynamic=False)(x), model(x))
    assert_close(torch.export.export(model, (x,)).module()(x), model(x))

"""NaLaFormer: sizes, any image, what reads pyramids."""

import pytest
import timm
import torch
from fused_networks import error, randomised
from tiers import quick, slow
from torch.testing import assert_close

import linvit
from linvit.analysis.cost import count_cost
from linvit.analysis.probe import probe
from linvit.layers import Attention2d

SMALL = {"widths": (16, 24, 32, 48), "depths": (1, 1, 2, 1), "heads": (2, 3, 4, 6), "final_width": 40, "num_classes": 5}
# Parameters counted by hand from the released code's settings; G of MACs with those of the attention.
COUNTED = {
    "nalaformer_xtiny": (6_142_248, "0.65"),
    "nalaformer_tiny": (15_907_752, "2.86"),
    "nalaformer_small": (25_654_184, "5.04"),
    "nalaformer_base": (52_002_952, "11.74"),
    "nalaformer_large": (95_426_760, "17.68"),
}


def small(pattern="LLSS", **options):
    torch.manual_seed(0)
    return randomised(timm.create_model("nalaformer_tiny", **{**SMALL, "pattern": pattern, **options})).eval()


def image(height=45, width=70):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_every_size_is_registered():
    assert set(timm.list_models("nalaformer_*")) == set(COUNTED)


@pytest.mark.parametrize("name", slow(*COUNTED))
def test_sizes_are_those_of_the_released_code(name):
    model = timm.create_model(name, device="meta")
    cost = count_cost(model, (3, 224, 224))
    assert (cost.parameters, f"{(cost.macs + cost.macs_attention) / 1e9:.2f}") == COUNTED[name]
    assert model.pattern == "LLSS"


@pytest.mark.slow
def test_the_printed_size_of_tiny_has_a_narrower_feed_forward():
    cost = count_cost(timm.create_model("nalaformer_tiny", ffn_ratio=3.5, device="meta"), (3, 224, 224))
    assert (round(cost.parameters / 1e6), f"{(cost.macs + cost.macs_attention) / 1e9:.1f}") == (15, "2.7")


@pytest.mark.parametrize("pattern", quick(["LLSS", "LLLL"], ["LLSS"]))
def test_every_parameter_gets_a_gradient_at_any_size(pattern):
    model = small(pattern).double().train()
    logits = model(image().double())
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.count_nonzero(), key


def test_black_images_have_finite_gradients():
    """Their queries are the bias, which is zero at the start."""
    model = timm.create_model("nalaformer_tiny", **SMALL)
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_features_have_the_declared_channels_and_strides():
    model = timm.create_model("nalaformer_tiny", features_only=True, **SMALL)
    for feature, channels, stride in zip(
        model(image()), model.feature_info.channels(), model.feature_info.reduction(), strict=True
    ):
        assert feature.shape == (2, channels, -(-45 // stride), -(-70 // stride))


def test_images_of_a_batch_do_not_meet_and_fusing_keeps_the_result():
    model, x = small("LLSS").double(), image().double()
    assert_close(model(x), torch.cat([model(one[None]) for one in x]))
    with torch.inference_mode():
        assert error(linvit.fuse(model)(x), model(x)) < 1e-10


def test_the_probe_sees_signed_queries_and_scores():
    model, x = small("LLSS").double(), image().double()
    probes = probe(model, x)
    assert [p.mechanism for p in probes] == ["nala", "nala", "softmax", "softmax", "softmax"]
    for seen in probes:
        width = seen.operands.value.shape[-1]
        assert seen.operands.query.shape[-1] == (2 * width if seen.mechanism == "nala" else width)
        assert_close(seen.scores() @ seen.operands.value, seen.outputs(), rtol=0, atol=1e-11)


def test_softmax_stages_become_linear():
    teacher = small("SSSS")
    student = linvit.linearize(teacher, "mala", "LLSS")
    assert student.pattern == "LLSS"
    assert student(image()).shape == (2, 5)
    with pytest.raises(ValueError, match="`mechanism` is 'agent', expected one of"):
        linvit.linearize(teacher, "agent")
    with pytest.raises(ValueError, match="`mechanism` is 'nala', expected one of"):
        Attention2d(16, 2, "nala")


OPTIONS = [{"modulation": "none"}, {"rope": False}, {"lepe": False}, {"blocks": (2, 2)}]


@pytest.mark.parametrize("attention", quick(OPTIONS, OPTIONS[-1:]))
def test_options_of_the_attention(attention):
    model, x = small("LLSS", attention=attention), image()
    assert model(x).isfinite().all()
    assert not torch.allclose(model(x), small("LLSS")(x))


@pytest.mark.slow
def test_compiles_and_exports():
    model, x = small("LSLS", depths=(1, 1, 1, 1)), image()
    assert_close(torch.compile(model, fullgraph=True, backend="eager", dynamic=False)(x), model(x))
    assert_close(torch.export.export(model, (x,)).module()(x), model(x))

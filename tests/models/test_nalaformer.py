"""NaLaFormer: black images, options, what reads pyramids."""

import pytest
import torch
from fused_networks import randomised
from test_all_models import create, image
from tiers import quick
from torch.testing import assert_close

import linvit
from linvit.analysis.probe import probe
from linvit.layers import Attention2d


def small(pattern="LLSS", **options):
    return randomised(create("nalaformer_tiny", num_classes=5, pattern=pattern, **options)).eval()


def test_black_images_have_finite_gradients():
    """Their queries are the bias, which is zero at the start."""
    model = create("nalaformer_tiny").train()
    assert model.pattern == "LLSS"
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_probe_sees_signed_queries_and_scores():
    model, x = small().double(), image(45, 70).double()
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
    assert student(image(45, 70)).shape == (2, 5)
    with pytest.raises(ValueError, match="`mechanism` is 'agent', expected one of"):
        linvit.linearize(teacher, "agent")
    with pytest.raises(ValueError, match="`mechanism` is 'nala', expected one of"):
        Attention2d(16, 2, "nala")


OPTIONS = [{"modulation": "none"}, {"rope": False}, {"lepe": False}, {"blocks": (2, 2)}]


@pytest.mark.parametrize("attention", quick(OPTIONS, OPTIONS[-1:]))
def test_options_of_the_attention(attention):
    model, x = small(attention=attention), image(45, 70)
    assert model(x).isfinite().all()
    assert not torch.allclose(model(x), small()(x))

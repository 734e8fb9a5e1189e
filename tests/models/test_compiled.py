"""Networks of every kind compile as one graph, for inference and for training, with the results of eager torch."""

import copy

import pytest
import timm
import torch
from tiers import quick
from torch.testing import assert_close

import linvit
from linvit.models import by_name

TINY = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}


def images(batch=2, channels=3, size=32):
    return torch.randn(batch, channels, size, size, dtype=torch.float64)


def frames():
    return torch.randn(2, 33, 40, dtype=torch.float64)


def nano(name, **options):
    return timm.create_model(name, depths=(1, 1, 1, 1), num_classes=7, **options)


def vit():
    return timm.create_model("deit_tiny_patch16_224", **TINY)


def swin():
    sizes = {"img_size": 56, "depths": (1, 1), "embed_dim": 32, "num_heads": (1, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes)


TRAINED = {
    **{name: lambda name=name: (nano(name), images()) for name in ("ravlt_nano", "mavit_nano", "care_nano")},
    "swapped DeiT": lambda: (linvit.swap_attention(vit(), "mala"), images()),
    "swapped Swin": lambda: (linvit.swap_attention(swin(), "rala"), images(size=56)),
    "linearized DeiT": lambda: (linvit.linearize(vit(), "rala"), images()),
    **{
        f"DeiT with {name}": lambda name=name: (linvit.swap_attention(vit(), name), images())
        for name in ("mhla", "vittt", "nala", "polaformer_pp", "recnext")
    },
    "MAViT in blocks": lambda: (nano("mavit_nano", attention={"blocks": (2, 2)}), images()),
    "linearized RAVLT": lambda: (linvit.linearize(nano("ravlt_nano", pattern="LLSS"), "mala"), images()),
    "Conformer": lambda: (by_name.create("conformer_nano", 7, depth=1), frames()),
    "DiT": lambda: (
        by_name.create("dit_nano_patch2", 7, depth=1),
        images(channels=1, size=8),
        torch.tensor([3, 700]),
        torch.tensor([0, 6]),
    ),
    "decoder": lambda: (by_name.create("sequence_nano", 11, depth=1), torch.randint(11, (2, 21))),
}
TRAINED["Conformer, padded"] = lambda: (*TRAINED["Conformer"](), torch.tensor([33, 20]))
FOLDED = (
    "ravlt_nano",
    "mavit_nano",
    "care_nano",
    "swapped DeiT",
    "swapped Swin",
    "linearized DeiT",
    "linearized RAVLT",
)


def built(name):
    """A network in float64 whose parameters are not zero, and its inputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network, *inputs = TRAINED[name]()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network.double(), inputs


def first(out):
    return out if isinstance(out, torch.Tensor) else next(x for x in out if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("name", quick(TRAINED, ["swapped DeiT"]))
def test_training_is_one_graph(name):
    network, inputs = built(name)
    eager = copy.deepcopy(network.train())
    torch.manual_seed(1)
    expected = first(eager(*inputs))
    torch.manual_seed(1)
    out = first(torch.compile(network, fullgraph=True, backend="aot_eager")(*inputs))
    assert_close(out, expected)
    for each in (out, expected):
        each.square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in eager.named_parameters()}
    assert any(grad is not None and grad.ne(0).any() for grad in gradients.values())
    for key, parameter in network.named_parameters():
        assert_close(parameter.grad, gradients[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", quick(TRAINED, ["decoder"]))
def test_inference_is_one_graph(name):
    network, inputs = built(name)
    network.eval()
    with torch.inference_mode():
        out = first(torch.compile(network, fullgraph=True, backend="aot_eager")(*inputs))
        assert_close(out, first(network(*inputs)))


@pytest.mark.parametrize("name", quick(FOLDED, ["swapped DeiT"]))
def test_inference_of_a_folded_network_is_one_graph(name):
    network, inputs = built(name)
    fused = linvit.fuse(network.eval())
    with torch.inference_mode():
        out = torch.compile(fused, fullgraph=True, backend="aot_eager")(*inputs)
        assert_close(out, network(*inputs))

"""Networks of every kind compile as one graph, for inference and for training, with the results of eager torch."""

import copy

import pytest
import timm
import torch
from test_all_models import SMALL
from tiers import quick, slow
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

import linvit
from linvit.models import by_name

TINY = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}


def images(batch=2, channels=3, size=32):
    return torch.randn(batch, channels, size, size, dtype=torch.float64)


def frames():
    return torch.randn(2, 33, 40, dtype=torch.float64)


def nano(name, **options):
    return timm.create_model(name, **{**options, "depths": (1, 1, 1, 1), "num_classes": 7})


def vit():
    return timm.create_model("deit_tiny_patch16_224", **TINY)


def swin():
    sizes = {"img_size": 56, "depths": (1, 1), "embed_dim": 32, "num_heads": (1, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes)


TRAINED = {
    "ravlt_nano": lambda: (nano("ravlt_nano"), images()),
    "mavit_nano": lambda: (nano("mavit_nano", pattern="LSLS"), images()),
    "care_nano": lambda: (nano("care_nano", pattern="CLSL"), images()),
    "H-ViT³": lambda: (nano("hvittt_tiny", **SMALL["hvittt_tiny"]), images()),
    "NaLaFormer": lambda: (nano("nalaformer_tiny", **SMALL["nalaformer_tiny"], pattern="LSLS"), images()),
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
        torch.tensor([0, 0]),  # whose cosines and sines are exact in float32, as which they are computed
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


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("name", quick(FOLDED, ["swapped DeiT"]))
def test_inference_of_a_folded_network_is_one_graph(name, backend):
    network, inputs = built(name)
    fused = linvit.fuse(network.eval())
    with torch.inference_mode():
        out = torch.compile(fused, fullgraph=True, backend=backend)(*inputs)
        assert_close(out, network(*inputs))


BY_INDUCTOR = (
    "ravlt_nano",
    "mavit_nano",
    "care_nano",
    "swapped DeiT",
    "linearized DeiT",
    "Conformer",
    "DiT",
    "decoder",
)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_computes_what_eager_torch_does(name, training):
    network, inputs = built(name)
    eager = copy.deepcopy(network.train(training))
    with torch._inductor.config.patch(fallback_random=True), torch.set_grad_enabled(training):
        torch.manual_seed(1)
        expected = first(eager(*inputs))
        torch.manual_seed(1)
        out = first(torch.compile(network, fullgraph=True)(*inputs))
    assert_close(out, expected)
    if training:
        for each in (out, expected):
            each.square().sum().backward()
        for given, wanted in zip(network.parameters(), eager.parameters(), strict=True):
            assert_close(given.grad, wanted.grad)


# Without plain ViTs: timm interpolates their positions to each size, which is a compilation each, with softmax too.
SIZED = {
    **{name: lambda name=name: nano(name) for name in ("ravlt_nano", "mavit_nano", "care_nano")},
    "RAVLT with softmax stages": lambda: nano("ravlt_nano", pattern="LLSS"),
    "H-ViT³": lambda: nano("hvittt_tiny"),
    "NaLaFormer": lambda: nano("nalaformer_tiny"),
    "folded MAViT": lambda: linvit.fuse(nano("mavit_nano").eval()),
    "folded CARE": lambda: linvit.fuse(nano("care_nano").eval()),
}


@pytest.mark.parametrize(
    "name", quick([*SIZED, *(f"training {name}" for name in SIZED if "folded" not in name)], ["care_nano"])
)
def test_two_compilations_serve_every_size(name):
    torch._dynamo.reset()
    training = name.startswith("training ")
    network, counter = SIZED[name.removeprefix("training ")]().train(training), CompileCounter()
    compiled = torch.compile(network, backend=counter, fullgraph=True)
    with torch.set_grad_enabled(training):
        for batch, *size in ((2, 64, 64), (3, 96, 128), (5, 128, 64), (2, 160, 96), (4, 64, 320)):
            compiled(torch.randn(batch, 3, *size))
        assert counter.frame_count == 2
        for compilations, (batch, *size) in {
            3: (2, 72, 90),
            4: (2, 32, 96),
            5: (1, 64, 96),
        }.items():  # padded, a row, one
            compiled(torch.randn(batch, 3, *size))
            assert counter.frame_count <= compilations

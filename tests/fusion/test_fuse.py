"""Fused networks against those that they were made from."""

import copy
import pickle
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from fused_networks import error, images, randomised
from tiers import quick, slow
from timm.layers import LayerNorm2d
from torch import nn
from torch.export import Dim, export

import linvit
from linvit.fusion import FORMS
from linvit.layers import AttentionBlock, CareBlock
from linvit.models.dense.backbone import DenseBackbone
from linvit.ops import Rotary

NAMES = timm.list_models(["ravlt_*", "mavit_*", "care_*"])
NANOS = ["ravlt_nano", "mavit_nano", "care_nano"]
OTHERS = ("hvittt_tiny", "nalaformer_xtiny")
SOME = ("ravlt_tiny", "care_s0")
FLOAT32, FLOAT64 = 1e-5, 1e-10  # the issue's, relative to the largest value
ATTENTIONS = [
    *({"modulation": name} for name in ("linear", "tanh", "identity", "none")),
    {"lepe": False, "rope": False},
    {"feature_map": "exp", "weighting": "learned", "normalizer": "learned"},
    {"normalizer": "subtract", "modulation": "none", "lepe": False},
]
MIXINGS = [
    {"distillation": False},
    {"split": "symmetric"},
    {"split": "stacked"},
    {"split": "attended"},
    {"interactions": (True, False)},
    {"interactions": (False, True)},
    {"interactions": (False, False), "memory": False, "widths": (24, 48, 48, 96)},
    {"memory": False, "widths": (24, 48, 48, 96)},
    {"local_sizes": (3,)},
    {"local_sizes": (7,), "pattern": "LSCC"},
]


def create(name, **kwargs):
    return randomised(timm.create_model(name, **kwargs))


def compare(model, x, bound=FLOAT64):
    """The outputs of the model fused in both forms, and for a GPU."""
    dtype = torch.float32 if bound == FLOAT32 else torch.float64
    with torch.inference_mode():
        model, x = copy.deepcopy(model).to(dtype), x.to(dtype)
        expected = model(x)
        for form in FORMS:
            assert error(linvit.fuse(model, form)(x), expected) < bound
        if bound == FLOAT64:  # the arithmetic of folding is that of the other forms
            assert error(linvit.fuse(model, for_device="cuda")(x), expected) < bound


@pytest.mark.parametrize("size", [(45, 70), *slow((32, 32), (96, 64))])
@pytest.mark.parametrize("name", NANOS)
def test_any_image_size(name, size):
    for bound in (FLOAT32, FLOAT64):
        compare(create(name), images(*size), bound)


@pytest.mark.parametrize("name", quick([*NAMES, *OTHERS], [*SOME, *OTHERS]))
def test_every_size_with_one_block_a_stage(name):
    empty = timm.create_model(name, depths=(1, 1, 1, 1), num_classes=10, device="meta").to_empty(device="cpu")
    compare(randomised(empty), images(40, 66, batch=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_network(name):
    for bound in (FLOAT32, FLOAT64):
        compare(create(name), images(96, 128, batch=1), bound)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_every_attention_of_ravlt(attention):
    compare(create("ravlt_nano", attention=attention, pattern="LSLL"), images(45, 70))


def test_ravlt_without_cpe_whatever_the_layout_of_its_input():
    model, x = create("ravlt_nano", cpe=False), images(45, 70)
    compare(model, x)
    compare(model, x.contiguous(memory_format=torch.channels_last))
    block, fused = model.stages[1].blocks[0], linvit.fuse(model).stages[1].blocks[0]
    x = torch.randn(2, 48, 7, 9)
    rotary = Rotary(*torch.rand(2, 63, 8))
    given = x.clone()
    assert error(fused(x, rotary), block(x, rotary)) < FLOAT32
    assert torch.equal(x, given)


@pytest.mark.parametrize("mixing", MIXINGS, ids=str)
def test_every_mixer_of_care(mixing):
    compare(create("care_nano", head_widths=(4, 4, 4, 4), **mixing), images(45, 70))


@pytest.mark.parametrize("name", NANOS)
def test_features_and_logits_before_the_classifier(name):
    model, x = create(name).double(), images(45, 70).double()
    fused = linvit.fuse(model)
    for pooling in ("avg", ""):
        if name == "care_nano":
            model.global_pool = fused.global_pool = pooling
        features = model.forward_features(x)
        assert error(fused.forward_features(x), features) < FLOAT64
        assert error(fused.forward_head(features), model.forward_head(features)) < FLOAT64
        expected = model.forward_head(features, pre_logits=True)
        assert error(fused.forward_head(features, pre_logits=True), expected) < FLOAT64


@pytest.mark.slow
@pytest.mark.parametrize("name", NANOS)
def test_a_network_for_gpus_is_compiled_copied_and_fused_again(name):
    model, x = create(name).double(), images(45, 70).double()
    fused = linvit.fuse(model, for_device="cuda")
    assert not any(isinstance(module, AttentionBlock | CareBlock | nn.LayerNorm) for module in fused.stages.modules())
    expected = model(x)
    for network in (
        pickle.loads(pickle.dumps(fused)),
        linvit.fuse(copy.deepcopy(fused), for_device="cuda"),
        torch.compile(fused, fullgraph=True, backend="aot_eager"),
    ):
        assert error(network(x), expected) < FLOAT64
    x.requires_grad_()
    found, wanted = (torch.autograd.grad(network(x).square().sum(), x)[0] for network in (fused, model))
    assert error(found, wanted) < FLOAT64


def test_other_devices_and_graphs_of_a_gpu_are_refused():
    model = create("ravlt_nano")
    with pytest.raises(ValueError, match="`for_device` is 'tpu', expected one of cpu, cuda"):
        linvit.fuse(model, for_device="tpu")
    with pytest.raises(ValueError, match="`form` 'graph' is for files of other runtimes"):
        linvit.fuse(model, "graph", for_device="cuda")


@pytest.mark.parametrize(("name", "pooling"), [*((name, "") for name in NANOS), ("ravlt_nano", "avg")])
def test_without_classes(name, pooling):
    compare(create(name, num_classes=0, global_pool=pooling), images(45, 70))


@pytest.mark.parametrize("name", NANOS)
def test_features_only(name):
    model, x = create(name, features_only=True), images(45, 70)
    fused = linvit.fuse(model)
    assert fused.feature_info.channels() == model.feature_info.channels()
    for got, expected in zip(fused(x), model(x), strict=True):
        assert error(got, expected) < FLOAT32


@pytest.mark.parametrize("name", [*NANOS, "mobilenetv4_conv_small"])
def test_dense_backbone(name):
    model, x = randomised(DenseBackbone(name)), images(64, 96)
    fused = linvit.fuse(model)
    for got, expected in zip(fused(x), model(x), strict=True):
        assert error(got, expected) < FLOAT32
    assert not any(isinstance(module, AttentionBlock | CareBlock) for module in fused.modules())


@pytest.mark.parametrize("name", NANOS)
def test_nothing_that_can_be_folded_is_left(name):
    model = create(name)
    fused = linvit.fuse(model)
    assert not any(isinstance(module, nn.BatchNorm2d | LayerNorm2d) for module in fused.modules())
    norms = [module for module in fused.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == (1 if name == "care_nano" else 2 * 5)
    assert all(norm.weight is None for norm in norms)
    assert not any(name.endswith(("gamma_1", "gamma_2")) for name in fused.state_dict())
    if name == "care_nano":
        assert fused.dist_head is None
        assert sum(p.numel() for p in fused.head.parameters()) < 0.51 * sum(
            p.numel() for head in (model.head, model.dist_head) for p in head.parameters()
        )
    else:
        assert len([m for m in fused.modules() if isinstance(m, nn.Conv2d)]) == 4 + 3 + 1 + 3 * 5


@pytest.mark.parametrize("name", NANOS)
def test_the_model_given_is_left_untouched(name):
    model, x = create(name), images(45, 70)
    before, names, expected = copy.deepcopy(model.state_dict()), [n for n, _ in model.named_modules()], model(x)
    fused = linvit.fuse(model)
    fused.load_state_dict({key: value + 1 for key, value in fused.state_dict().items()})
    assert [n for n, _ in model.named_modules()] == names
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(x), expected)
    assert model.train().training


@pytest.mark.parametrize("name", NANOS)
def test_fused_again_copied_pickled_and_loaded_it_gives_the_same(name):
    fused, x = linvit.fuse(create(name)), images(45, 70)
    expected = fused(x)
    other = linvit.fuse(timm.create_model(name).eval())
    assert not torch.equal(other(x), expected)
    other.load_state_dict(fused.state_dict())
    for same in (linvit.fuse(fused), copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), other):
        assert torch.equal(same(x), expected)
        assert same.eval() is same
        with pytest.raises(ValueError, match="a fused model has no train mode"):
            same.train()


@pytest.mark.parametrize("name", NANOS)
def test_train_mode_is_refused(name):
    model = create(name)
    with pytest.raises(ValueError, match=r"the model is in train mode.*eval\(\)"):
        linvit.fuse(copy.deepcopy(model).train())
    inside = copy.deepcopy(model)
    inside.stem[1].train()
    with pytest.raises(ValueError, match=r"stem\.1 is in train mode"):
        linvit.fuse(inside)
    fused = linvit.fuse(model)
    with pytest.raises(ValueError, match="a fused model has no train mode"):
        fused.train()
    assert not any(module.training for module in fused.modules())
    assert not any(parameter.requires_grad for parameter in fused.parameters())


@pytest.mark.parametrize("name", NANOS)
def test_gradients_reach_the_image(name):
    model, x = create(name).double(), images(45, 70).double().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(linvit.fuse(model)(x).square().sum(), x)
    assert error(got, expected) < 10 * FLOAT64


@pytest.mark.parametrize("name", NANOS)
def test_half_precision_is_no_worse_than_unfused(name):
    model, x = create(name), images(64, 96)
    expected = copy.deepcopy(model).double()(x.double()).float()
    fused = linvit.fuse(model).bfloat16()(x.bfloat16())
    late = linvit.fuse(copy.deepcopy(model).bfloat16())(x.bfloat16())
    plain = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert fused.dtype == late.dtype == torch.bfloat16
    for got in (fused, late):
        assert error(got.float(), expected) < 2 * error(plain.float(), expected)


@pytest.mark.parametrize("name", NANOS[:2])
def test_autocast(name):
    model, x = create(name), images(64, 96)
    fused, expected = linvit.fuse(model), model(x)
    with torch.autocast("cpu", torch.bfloat16):
        plain, got = model(x), fused(x)
    assert got.dtype == plain.dtype
    assert error(got.float(), expected) < 2 * error(plain.float(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NANOS)
def test_export_with_dynamic_sides(name):
    # Sides from 64 px, as for networks that are not fused: export treats maps of one position as constants.
    fused = linvit.fuse(create(name))
    sides = {2: Dim("height", min=64, max=1024), 3: Dim("width", min=64, max=1024)}
    shapes = {"x": {0: Dim("batch", max=64), **sides}}
    program = export(fused, (images(96, 128),), dynamic_shapes=shapes).module()
    for batch, height, width in ((1, 64, 80), (3, 131, 70)):
        x = images(height, width, batch)
        assert error(program(x), fused(x)) < FLOAT32


def test_layers_of_another_class_stay_as_they_are():
    class Doubled(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = create("mavit_nano")
    old = model.stages[1].blocks[0].ffn.fc2
    new = Doubled(old.in_channels, old.out_channels, 1).eval()
    new.load_state_dict(old.state_dict())
    model.stages[1].blocks[0].ffn.fc2 = new
    compare(model, images(45, 70))
    fused = linvit.fuse(model)
    assert isinstance(fused.stages[1].blocks[0], AttentionBlock)
    assert not isinstance(fused.stages[2].blocks[0], AttentionBlock)


def test_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "use" / "fuse.md").read_text()
    names = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert error(names["fused"](images(32, 32)), names["model"](images(32, 32))) < FLOAT32


@cache
def no_compiler():
    raise ValueError("there is no C++ compiler")


def test_fast_is_the_model_for_many_inputs(monkeypatch):
    model, x = timm.create_model("ravlt_nano", num_classes=3).eval(), torch.randn(2, 3, 64, 96)
    monkeypatch.setattr(linvit.fusion.cpu, "build", no_compiler)  # other tests are of torch
    run = linvit.fast(model, x)
    other = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert (run(other) - model(other)).abs().max() < 1e-4 * model(other).abs().max()
    half = linvit.fast(model, x, torch.bfloat16)(other)
    assert half.dtype == torch.bfloat16
    assert (half.double() - model(other).double()).abs().max() < 0.1 * model(other).abs().max()


def test_fast_refuses_what_is_not_the_models_output(monkeypatch):
    model, x = timm.create_model("ravlt_nano", num_classes=3).eval(), torch.randn(2, 3, 64, 64)
    monkeypatch.setattr(linvit.fusion.cpu, "build", no_compiler)
    monkeypatch.setattr("linvit.fusion._folded", lambda model, *_: torch.nn.Sequential(model, torch.nn.Softmax(1)))
    with pytest.raises(ValueError, match=r"differs from that of the model by .* expected at most 1e-04"):
        linvit.fast(model, x)

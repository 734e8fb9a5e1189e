import copy
import json

import pytest
import timm
import torch
from linearize_teachers import SMALL, body, image
from timm.models import get_model_args, save_for_hf
from torch.testing import assert_close

import linvit
from linvit.layers.mechanisms import MECHANISMS
from linvit.models import by_name
from linvit.models.sequence import DecoderCache

TEACHERS = {
    "ViT": ("vit_small_patch14_reg4_dinov2", SMALL),
    "Eva": ("vit_small_patch16_dinov3", SMALL),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": (32, 48), "patch_size": 2, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}
        | {"window_size": 2, "num_classes": 5},
    ),
    "PVT": (
        "pvt_v2_b0",
        {"depths": (1, 1, 1, 1), "embed_dims": (16, 24, 32, 32), "num_heads": (1, 2, 4, 4), "num_classes": 5},
    ),
    "SAM": ("samvit_base_patch16", {**SMALL, "img_size": (32, 48), "window_size": 2, "global_attn_indexes": (1,)}),
    "RAVLT": ("ravlt_nano", {"pattern": "SSSS", "num_classes": 5}),
    "CARE": ("care_nano", {"pattern": "CCSS", "num_classes": 5}),
}
LETTERS = {"ViT": 1, "Eva": 1, "Swin": 2, "PVT": 4, "SAM": 1, "RAVLT": 4, "CARE": 4}
LINEAR = [name for name, mechanism in MECHANISMS.items() if mechanism.axes is not None and "_" not in name]


def teacher(name):
    model, kwargs = TEACHERS[name]
    return body(model, **kwargs)


@pytest.mark.parametrize("name", TEACHERS)
def test_blocks_that_stay_are_bit_for_bit_the_teachers(name):
    network, x = teacher(name), image()
    state = copy.deepcopy(network.state_dict())
    same = linvit.linearize(network, "mala", "S" * LETTERS[name])
    assert same is not network
    assert torch.equal(same(x), network(x))
    student = linvit.linearize(network, "mala")
    assert not torch.allclose(student(x), network(x))
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("name", TEACHERS)
def test_timm_rebuilds_it(name, tmp_path):
    student, x = linvit.linearize(teacher(name), "mala"), image()
    rebuilt = timm.create_model("linearized", **json.loads(json.dumps(get_model_args(student)))).eval()
    rebuilt.load_state_dict(student.state_dict())
    assert torch.equal(rebuilt(x), student(x))
    save_for_hf(student, tmp_path)
    stored = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(stored(x), student(x))


@pytest.mark.parametrize("mechanism", LINEAR)
def test_what_a_mechanism_adds_starts_as_nothing(mechanism):
    network, tokens = teacher("ViT"), torch.randn(2, 29, 32)
    student = linvit.linearize(network, mechanism, "LS")
    attention = student.blocks[0].attn
    seen = []
    attention.operator.register_forward_hook(lambda _, inputs, output: seen.append(output))
    attention.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attention(tokens, [4, 6])
    started = seen[0].transpose(1, 2).flatten(2)
    if mechanism == "nala":
        assert_close(seen[1], torch.nn.functional.layer_norm(started, (32,)))
    elif mechanism != "linear_angular":  # it normalizes its output
        assert torch.equal(seen[1], started)
    before = dict(network.blocks[0].named_parameters())
    after = dict(student.blocks[0].named_parameters())
    assert all(torch.equal(after[key], value) for key, value in before.items() if not key.startswith("mlp"))
    assert torch.equal(student.blocks[1].attn.qkv.weight, network.blocks[1].attn.qkv.weight)
    assert torch.equal(student.blocks[0].mlp(tokens), network.blocks[0].mlp(tokens))


def test_a_learned_rotation_starts_at_none_and_learns():
    student = linvit.linearize(teacher("ViT"), "rala")
    without = linvit.linearize(teacher("ViT"), "rala", attention={"rope": False})
    x = image()
    assert torch.equal(student(x), without(x))
    student(x).square().sum().backward()
    turn = student.blocks[0].attn.turn
    assert turn.grad.abs() > 0
    with torch.no_grad():
        turn.fill_(1.0)
    turned = linvit.linearize(teacher("ViT"), "rala", attention={"rope": True})
    assert_close(student.blocks[0](torch.ones(1, 29, 32).cumsum(1)), turned.blocks[0](torch.ones(1, 29, 32).cumsum(1)))


@pytest.mark.parametrize("mechanism", ["rala", "mala", "inline", "focused", "polaformer", "agent"])
def test_every_parameter_gets_a_gradient(mechanism):
    student = linvit.linearize(teacher("ViT"), mechanism).train()
    for step in range(2):  # after one, what started at 0 no longer hides what comes before it
        student(image()).square().sum().backward()
        if step == 0:
            torch.optim.SGD(student.parameters(), 1e-2).step()
    without = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert without == []


def test_other_sizes_than_the_teachers():
    network = body("vit_small_patch14_reg4_dinov2", **SMALL, dynamic_img_size=True)
    student = linvit.linearize(network, "mala")
    assert student(image(64, 16)).shape == (2, 5)


def test_stages_of_ours_keep_everything_but_the_operator():
    network = body("ravlt_nano", pattern="LLSS", num_classes=5)
    student = linvit.linearize(network, "rala")
    assert student.pattern == "LLLL"
    linear = timm.create_model("ravlt_nano", pattern="LLLL", num_classes=5).eval()
    linear.load_state_dict(network.state_dict())
    assert torch.equal(student(image()), linear(image()))
    half = linvit.linearize(network, "mala", "SSSL", {"normalizer": "divide"})
    assert half.pattern == "LLSL"
    assert half.stages[3].blocks[0].attn.operator.options["normalizer"] == "divide"


def test_a_decoder_stays_causal():
    torch.manual_seed(0)
    network = by_name.create("sequence_nano", 11, mechanism="softmax").eval()
    student = linvit.linearize(network, "mala")
    tokens = torch.arange(8)[None]
    assert_close(student(tokens)[:, :5], student(tokens[:, :5]))
    with pytest.raises(ValueError, match="`mechanism` is 'inline', expected one of"):
        linvit.linearize(network, "inline")


@pytest.mark.parametrize("pattern", ["LLLL", "LSLS"])
def test_a_decoder_decodes_with_its_cache(pattern):
    torch.manual_seed(0)
    network = by_name.create("sequence_nano", 11, mechanism="softmax").double().eval()
    student = linvit.linearize(network, "mala", pattern)
    tokens, cache = torch.randint(11, (2, 9)), DecoderCache()
    steps = [student.read(part, cache) for part in tokens.split([4, 1, 1, 3], 1)]
    assert_close(torch.cat(steps, 1), student(tokens))


def test_a_dit_keeps_everything_but_the_operator():
    torch.manual_seed(0)
    arguments = {"input_size": 8, "channels": 1}
    network = by_name.create("dit_nano_patch2", 10, mechanism="softmax", **arguments).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # its output is 0 at first
    given = torch.randn(2, 1, 8, 8), torch.tensor([5, 900]), torch.tensor([3, 10])
    student = linvit.linearize(network, "linear")
    linear = by_name.create("dit_nano_patch2", 10, mechanism="linear", **arguments).eval()
    linear.load_state_dict(student.state_dict())
    assert_close(student(*given), linear(*given))
    assert (student(*given) - network(*given)).abs().max() > 1e-3
    half = linvit.linearize(network, "rala", "S" * len(network.blocks))
    assert torch.equal(half(*given), network(*given))


def test_the_mode_is_the_models():
    network = teacher("ViT").train()
    assert linvit.linearize(network, "mala").blocks[0].attn.training
    assert network.training


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ViT", ("softmax",), "`mechanism` is 'softmax', expected linear attention"),
        ("ViT", ("vittt",), "`mechanism` is 'vittt', expected linear attention: choose another"),
        ("ViT", ("male",), "Did you mean 'mala'"),
        ("ViT", ("mala", "LLL"), "`pattern` is 'LLL', expected 2 letters"),
        ("ViT", ("mala", None, {"modulation": "tanh"}), "the gate cannot start as 1 with this `modulation`"),
        ("RAVLT", ("mala", None, {"lepe": True}), "`attention` has the key 'lepe', expected some of feature_map"),
        ("RAVLT", ("agent",), "`mechanism` is 'agent', expected one of"),
    ],
)
def test_one_sentence_for_each_mistake(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        linvit.linearize(teacher(name), *arguments)


def test_networks_that_have_nothing_to_replace():
    for model in (timm.create_model("resnet10t"), timm.create_model("ravlt_nano", pattern="LLLL")):
        with pytest.raises(ValueError, match="without softmax attention that we know: choose another model, or write"):
            linvit.linearize(model)
    conformer = by_name.create("conformer_nano", 11, mechanism="softmax")
    with pytest.raises(ValueError, match="the softmax attention of a Conformer has a projection of positions"):
        linvit.linearize(conformer)
    with pytest.raises(TypeError, match=r"`model` is of type str, expected an nn\.Module"):
        linvit.linearize("ravlt_nano")


@pytest.mark.parametrize("base", ["vit_small_patch14_dinov9", "hf-hub:timm/vit", {"img_size": 32}, 7])
def test_an_unknown_base(base):
    with pytest.raises(ValueError, match=r"Unknown model|would be read from a hub|`base` is|base\.name is ''"):
        timm.create_model("linearized", base=base)


def test_a_tag_is_the_base_without_its_weights():
    network = timm.create_model("linearized", base="deit_tiny_patch16_224.fb_in1k", num_classes=3, depth=1)
    assert network.pretrained_cfg["architecture"] == "linearized"
    assert "hf_hub_id" not in network.pretrained_cfg
    with pytest.raises(RuntimeError, match="linearized has no published weights"):
        timm.create_model("linearized", pretrained=True)


@pytest.mark.parametrize("name", ["ViT", "Eva", "Swin", "RAVLT"])
def test_it_goes_through_fuse_and_gives_features(name):
    model, kwargs = TEACHERS[name]
    student, x = linvit.linearize(body(model, **({**kwargs, "depth": 4} if "depth" in kwargs else kwargs))), image()
    assert_close(linvit.fuse(student)(x), student(x), rtol=1e-4, atol=1e-4)
    features = timm.create_model("linearized", **get_model_args(student), features_only=True).eval()
    assert features(x)[-1].ndim == 4

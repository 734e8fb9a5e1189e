import copy
import pickle

import pytest
import timm
import torch
from test_all_models import visible
from tiers import slow
from timm.layers import PatchDropout
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Attention
from torch._dynamo.testing import CompileCounter
from torch.export import export
from torch.testing import assert_close

from linvit import swap_attention
from linvit.layers.mechanisms import MECHANISMS

VIT = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = {"img_size": (64, 96), "embed_dim": 16, "depths": (2, 1, 2, 1), "num_heads": (1, 2, 4, 4), "window_size": 2}
PVT = {"depths": (1, 1, 2, 1), "embed_dims": (16, 24, 32, 32), "num_heads": (1, 2, 4, 4), "mlp_ratios": (2, 2, 2, 2)}
BODIES = {
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "vit_small_patch14_reg4_dinov2": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "swin_s3_tiny_224": {**SWIN, "img_size": (60, 100), "window_size": (3, 2, 2, 2)},
    "pvt_v2_b0": PVT,
    "pvt_v2_b2_li": PVT,
}
SIZES = {"swin_s3_tiny_224": (60, 100), "swin_tiny_patch4_window7_224": (64, 96)}
DEIT, SWIN_T, PVT_B0 = "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0"
WITHOUT_LOCAL = ("softmax", "linear", "hydra", "efficient")


def body(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **{**BODIES[name], **kwargs}).eval()


def image(height=32, width=48, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def combinations():
    """Every body with every mechanism; among the quick tests two bodies with all of them, and all bodies with MALA."""
    for name in BODIES:
        for mechanism in MECHANISMS:
            if mechanism not in ("linear_relu", "linear_exp"):
                quick = name in (SWIN_T, PVT_B0) or mechanism == "mala"
                yield pytest.param(name, mechanism, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "mechanism"), list(combinations()))
def test_every_body_takes_every_mechanism(name, mechanism):
    if name.startswith("pvt") and mechanism == "enhanced":
        with pytest.raises(ValueError, match="local feed-forward, which PVT has already: use 'linear_relu'"):
            swap_attention(body(name), mechanism)
        return
    model = swap_attention(body(name), mechanism)
    logits = model(image(*SIZES.get(name, (32, 48))))
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    assert model.mechanism == mechanism
    assert set(model.pattern) == {"S" if MECHANISMS[mechanism].softmax else "L"}


def test_softmax_attention_in_other_surroundings_is_an_s_in_the_pattern():
    model = swap_attention(body(DEIT), "rala", attention={"mechanism": "softmax"})
    assert (model.mechanism, model.pattern) == ("rala", "S")
    assert swap_attention(body(SWIN_T), "softmax_unit_query", "LLSS").pattern == "SSSS"


@pytest.mark.parametrize("name", BODIES)
def test_projections_keep_their_weights(name):
    model = body(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    own = dict(model.named_parameters())
    swap_attention(model, "rala")
    after = model.state_dict()
    dropped = ("relative_position", "attn.q.", "attn.kv.", "attn.sr.", "attn.norm.", "attn_mask")
    for key, value in before.items():
        if not any(part in key for part in dropped):
            assert torch.equal(after[key], value), key
    for key, parameter in model.named_parameters():
        if key in own:
            assert parameter is own[key], key  # an optimizer made before still holds it
    if name.startswith("pvt"):
        joined = after["stages.1.blocks.0.attn.qkv.weight"]
        parts = [before[f"stages.1.blocks.0.attn.{part}.weight"] for part in ("q", "kv")]
        assert torch.equal(joined, torch.cat(parts))


@pytest.mark.parametrize("name", BODIES)
def test_a_pattern_of_softmax_leaves_the_model_as_it_was(name):
    model, x = visible(body(name)), image(*SIZES.get(name, (32, 48)))
    swapped = swap_attention(copy.deepcopy(model), "rala", "S" if name.startswith(("deit", "vit")) else "SSSS")
    assert list(swapped.state_dict()) == list(model.state_dict())
    assert torch.equal(swapped(x), model(x))


@pytest.mark.parametrize(("mechanism", "other"), [("rala", "vittt"), ("vittt", "linear")])
def test_an_inner_step_and_attention_have_layers_of_their_own(mechanism, other):
    with pytest.raises(ValueError, match=f"`mechanism` is '{other}', which this layer cannot compute: choose its own"):
        swap_attention(body(DEIT), mechanism, attention={"mechanism": other})


def test_pattern_says_which_stages():
    model = swap_attention(body(SWIN_T), "rala", "LSLS")
    softmax = [isinstance(block.attn, WindowAttention) for stage in model.layers for block in stage.blocks]
    assert softmax == [False, False, True, False, False, True]
    assert model.pattern == "LSLS"


@pytest.mark.parametrize(("pattern", "expected"), [("LS", "LLSS"), ("LSSL", "LSSL"), ("S", "SSSS"), (None, "LLLL")])
def test_pattern_of_a_vit_runs_over_its_blocks(pattern, expected):
    model = swap_attention(body(DEIT, depth=4), "mala", pattern)
    assert "".join("S" if isinstance(block.attn, Attention) else "L" for block in model.blocks) == expected


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(DEIT, ""), (DEIT, "LLS"), (DEIT, "LX"), (SWIN_T, "LS"), (SWIN_T, "llll"), (PVT_B0, "LLLLL"), (PVT_B0, "LLLX")],
)
def test_wrong_pattern(name, pattern):
    model = body(name, **({"depth": 4} if name == DEIT else {}))
    with pytest.raises(ValueError, match=rf"`pattern` is '{pattern}', expected 4 letters.*L for the mechanism or S"):
        swap_attention(model, "rala", pattern)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "resnet10t",
            ("rala",),
            "`model` is of type ResNet, expected one of VisionTransformer, Eva, NaFlexVit, Vision",
        ),
        (DEIT, ("performer",), "`mechanism` is 'performer', expected one of softmax, .*rala"),
        (DEIT, ("rala", "LLL"), "`pattern` is 'LLL'"),
        (DEIT, ("rala", None, {"modulation": "sigmoid"}), "`modulation` is 'sigmoid'"),
        (DEIT, ("softmax", None, {"weighting": "uniform"}), "accepts no weighting"),
        (DEIT, ("vittt", None, {"weighting": "query_mean"}), "`mechanism` 'vittt' accepts no weighting"),
        (SWIN_T, ("mala", "LLLL", {"modulation": "sigmoid"}), "`modulation` is 'sigmoid'"),
    ],
)
def test_after_an_error_the_model_is_unchanged(name, arguments, message):
    model = body(name) if name in BODIES else timm.create_model(name).eval()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        swap_attention(model, *arguments)
    assert dict(model.named_modules()) == modules
    assert not hasattr(model, "mechanism")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("vit_base_patch16_rpn_224", VIT, "block has a ResPostBlock, expected timm's Block"),
        (DEIT, {**VIT, "patch_drop_rate": 0.5}, "drops patches in training.*create it with patch_drop_rate=0"),
        ("vit_small_patch16_dinov3", {**VIT, "patch_drop_rate": 0.5}, "the model drops patches in training"),
        (DEIT, {**VIT, "embed_dim": 36, "num_heads": 6}, "head width is 6, expected a multiple of 4"),
        ("vit_tiny_r_s16_p8_224", {"img_size": 32}, "patch embedding is a HybridEmbed"),
        (
            "swin_tiny_patch4_window7_224",
            {**SWIN, "head_dim": 8},
            "heads of the attention are not 16 channels wide in total",
        ),
        ("vit_base_patch16_224", {**VIT, "depth": 1, "attn_layer": "diff"}, "expected timm's Attention"),
    ],
)
def test_what_cannot_be_swapped(name, kwargs, message):
    model = timm.create_model(name, **kwargs)
    with pytest.raises(ValueError, match=message):
        swap_attention(model, "rala")


def test_arguments_reach_the_mechanism():
    model = swap_attention(body(SWIN_T), "rala", "LLSS", {"modulation": "none", "weighting": "uniform"})
    attention = model.layers[0].blocks[0].attn
    assert attention.modulation is None
    assert attention.operator.options["weighting"] == "uniform"


def test_agents_grow_with_the_stages():
    model = swap_attention(body(SWIN_T), "agent")
    assert [stage.blocks[0].attn.agents for stage in model.layers] == [(3, 3), (4, 4), (7, 7), (7, 7)]
    model = swap_attention(body(SWIN_T), "agent", attention={"agents": (2, 5)})
    assert {stage.blocks[0].attn.agents for stage in model.layers} == {(2, 5)}


def test_swapped_twice_is_the_second():
    model, x = visible(body(DEIT)), image()
    once = swap_attention(copy.deepcopy(model), "linear")
    with pytest.raises(ValueError, match="has been swapped already: create the model again"):
        swap_attention(once, "rala")
    two_mechanisms = swap_attention(body(DEIT, depth=4), "rala", "LLSS")
    assert two_mechanisms(x).shape == (2, 5)


def test_mode_dtype_and_device_are_the_models():
    model = body(DEIT).double().train()
    swap_attention(model, "enhanced")
    assert all(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    on_meta = swap_attention(timm.create_model(SWIN_T, device="meta", **SWIN), "agent")
    assert all(tensor.is_meta for tensor in (*on_meta.parameters(), *on_meta.buffers()))


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        (DEIT, "focused"),
        (DEIT, "enhanced"),
        (SWIN_T, "focused"),
        (SWIN_T, "agent"),
        (PVT_B0, "agent"),
        (PVT_B0, "rala"),
    ],
)
def test_copies_are_independent_and_equal(name, mechanism):
    model, x = visible(swap_attention(body(name), mechanism)), image(64, 96)
    if name == DEIT:
        x = image()
    expected = model(x)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    other = swap_attention(body(name), mechanism)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.deepcopy(model).parameters():
            parameter.zero_()
    for twin in (copied, pickled, other, model):
        assert torch.equal(twin(x), expected)


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        *((DEIT, mechanism) for mechanism in ("rala", "focused", "agent", "enhanced", "mlla")),
        *((SWIN_T, mechanism) for mechanism in ("rala", "focused", "agent")),
        ("vit_small_patch14_reg4_dinov2", "mlla"),
    ],
)
def test_any_resolution_one_after_another(name, mechanism):
    model = visible(swap_attention(body(name, dynamic_img_size=True), mechanism))
    sizes = [(32, 48), (48, 32), (64, 24), (32, 48)] if name != SWIN_T else [(64, 96), (96, 64), (68, 44), (64, 96)]
    first, turned, _, again = (model(image(*size)) for size in sizes)
    assert torch.equal(first, again)
    assert not torch.allclose(first, turned)
    copied = copy.deepcopy(model)  # a copy has its own grid
    copied(image(*sizes[1]))
    assert torch.equal(model(image(*sizes[0])), first)


@pytest.mark.parametrize(("name", "size"), [(DEIT, (40, 24)), (SWIN_T, (96, 64))])
@pytest.mark.parametrize("mechanism", ["mala", "focused", "agent"])
def test_set_input_size_is_dynamic_size(name, size, mechanism):
    dynamic = visible(swap_attention(body(name, dynamic_img_size=True), mechanism, "L" if name == DEIT else "LLSS"))
    fixed = swap_attention(body(name), mechanism, "L" if name == DEIT else "LLSS")
    fixed.load_state_dict(dynamic.state_dict())
    with pytest.raises(AssertionError, match="height"):
        fixed(image(*size))
    fixed.set_input_size(img_size=size, **({"window_size": 2} if name == SWIN_T else {}))
    assert_close(fixed(image(*size)), dynamic(image(*size)))


@pytest.mark.parametrize(("name", "mechanism"), [(DEIT, "rala"), (SWIN_T, "enhanced"), (PVT_B0, "focused")])
def test_gradient_checkpointing_changes_nothing(name, mechanism):
    gradients = []
    for checkpointing in (False, True):
        model = visible(swap_attention(body(name), mechanism)).double()
        model.set_grad_checkpointing(checkpointing)
        model(image(*((64, 96) if name != DEIT else (32, 48))).double()).square().sum().backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert gradient.isfinite().all(), key
        assert_close(gradients[1][key], gradient)


@pytest.mark.parametrize("mechanism", ["rala", "enhanced"])
def test_checkpointing_with_two_sizes_before_one_backward(mechanism):
    gradients = []
    for checkpointing in (False, True):
        model = visible(swap_attention(body(DEIT, dynamic_img_size=True), mechanism)).double()
        model.set_grad_checkpointing(checkpointing)
        (model(image(32, 48).double()).sum() * model(image(24, 24).double()).sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(("name", "channels"), [(SWIN_T, [16, 32, 64, 128]), (PVT_B0, [16, 24, 32, 32])])
def test_feature_maps(name, channels):
    model = swap_attention(body(name), "mala", "LLSS")
    maps = model.forward_intermediates(image(64, 96), intermediates_only=True)
    assert [tuple(m.shape[1:]) for m in maps] == [
        (c, 64 // s, 96 // s) for c, s in zip(channels, (4, 8, 16, 32), strict=True)
    ]


@pytest.mark.parametrize("mechanism", ["rala", *slow("focused", "enhanced", "agent")])
def test_exports(mechanism):
    model, x = visible(swap_attention(body(DEIT), mechanism)), image()
    assert_close(export(model, (x,)).module()(x), model(x))


def test_dropped_patches_are_refused():
    model = swap_attention(body(DEIT), "rala")
    model.patch_drop = PatchDropout(0.5)
    with pytest.raises(ValueError, match="dropped or pruned patches have no grid, keep them all"):
        model.train()(image())


@pytest.mark.parametrize(
    ("mechanism", "attention"),
    [
        ("linear", None),
        ("rala", {"lepe": False, "modulation": "none"}),
        ("mala", None),
        ("rala", {"mechanism": "softmax"}),
    ],
)
def test_save_for_hf_stores_what_rebuilds_a_swapped_network(mechanism, attention, tmp_path):
    sizes = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "num_classes": 3}
    teacher = timm.create_model("deit_tiny_patch16_224", **sizes)
    network = swap_attention(teacher, mechanism, attention=attention).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(network(x), again(x))


def test_a_swapped_network_compiles_once():
    torch._dynamo.reset()
    network = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=32, num_heads=2, img_size=32).eval()
    swap_attention(network, "mala", attention={"rope": False})
    counter = CompileCounter()
    compiled = torch.compile(network, backend=counter)
    for _ in range(3):
        with torch.no_grad():
            compiled(torch.randn(2, 3, 32, 32))
    assert counter.frame_count == 1

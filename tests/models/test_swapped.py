import pytest
import timm
import torch
from tiers import quick
from timm.optim import param_groups_weight_decay

from linvit.layers.mechanisms import MECHANISMS
from linvit.models.swap import BASES, NAMES

SMALL = {
    "deit_tiny": {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "swin_tiny": {"img_size": 64, "embed_dim": 24, "depths": (1, 1, 2, 1), "window_size": 2},
}
SMALL_NAMES = [name for name in NAMES if not name.startswith("swin_small")]
# every mechanism once, and one of each class in windows
SOME = [name for name in SMALL_NAMES if name.startswith("deit") or name.endswith(("_rala", "_agent", "_focused"))]


def small(name, **kwargs):
    torch.manual_seed(0)
    size = SMALL["deit_tiny" if name.startswith("deit") else "swin_tiny"]
    if name == "deit_tiny_inline":
        size = {key: value for key, value in size.items() if key != "num_heads"}
    return timm.create_model(name, num_classes=5, **{**size, **kwargs}).eval()


def image(height=64, width=64):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_names():
    assert len(NAMES) == len(set(NAMES)) == 2 + sum(len(entry.networks) for entry in MECHANISMS.values())
    assert {"deit_tiny_rala_mala", "deit_tiny_agent", "swin_tiny_agent", "swin_small_agent"} < set(NAMES)
    assert "swin_tiny_rala_mala" not in NAMES
    assert set(NAMES) <= set(timm.list_models())


@pytest.mark.parametrize(
    "name", quick(NAMES, [n for n in NAMES if "tiny" in n and n.endswith(("_mala", "_inline", "_softmax"))])
)
def test_pattern_and_mechanism(name):
    model = timm.create_model(name, device="meta")
    base = next(base for base in BASES if name.startswith(f"{base}_"))
    mechanism = name.removeprefix(f"{base}_").removesuffix("_256")  # pixels, in the names of MHLA's networks
    assert model.mechanism == mechanism
    letters = {
        "deit_tiny": "L",
        "deit_small": "L",
        "swin_tiny": "LLLS" if mechanism in ("inline", "agent") else "LLSS",
    }.get(base, "LLSS")
    if mechanism in ("softmax", "softmax_unit_query"):
        letters = "S" * len(letters)
    assert "".join(dict.fromkeys(model.pattern)) == "".join(dict.fromkeys(letters))
    if not name.startswith("deit"):
        assert model.pattern == letters
    assert model.pretrained_cfg["input_size"] == (3, 224, 224)


def test_a_network_for_large_images():
    model = timm.create_model("deit_tiny_linear", img_size=(2048, 4096), device="meta")
    assert model.pos_embed.shape == (1, 128 * 256 + 1, 192)


@pytest.mark.parametrize("name", quick(SMALL_NAMES, SOME))
def test_weights_may_be_drawn_after_to_empty(name):
    model = small(name, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    model.init_weights()
    for key, parameter in model.named_parameters():
        assert parameter.isfinite().all(), key
    if name.startswith("deit"):
        assert model(image()).isfinite().all()


def test_softmax_is_timms_network():
    for ours, theirs in (("deit_tiny_softmax", "deit_tiny_patch16_224"), ("swin_tiny_softmax", SWIN)):
        model = small(ours)
        other = timm.create_model(theirs, num_classes=5, **SMALL["deit_tiny" if ours[0] == "d" else "swin_tiny"]).eval()
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(image()), other(image()))


SWIN = "swin_tiny_patch4_window7_224"


def test_pretrained_weights_of_the_base_fit_what_is_shared():
    base = timm.create_model(SWIN, num_classes=5, **SMALL["swin_tiny"])
    missing = small("swin_tiny_rala").load_state_dict(base.state_dict(), strict=False).missing_keys
    assert missing
    assert all(".attn.lepe." in key or ".attn.modulation." in key for key in missing)


def test_arguments_of_body_and_mechanism():
    model = small("deit_tiny_rala", depth=4, pattern="LS", attention={"modulation": "tanh", "weighting": "learned"})
    assert model.pattern == "LS"
    assert [type(block.attn).__name__ for block in model.blocks] == ["GatedAttention"] * 2 + ["Attention"] * 2
    assert isinstance(model.blocks[0].attn.modulate, torch.nn.Tanh)
    assert model.blocks[0].attn.operator.mean_query is not None
    with pytest.raises(TypeError, match="not_an_argument"):
        small("swin_tiny_rala", not_an_argument=1)
    with pytest.raises(ValueError, match="softmax attention has no axes to change"):
        small("deit_tiny_softmax", attention={"weighting": "uniform"})


@pytest.mark.parametrize("name", ["deit_tiny_focused", "swin_tiny_agent"])
def test_tables_decay_as_in_their_authors_training(name):
    """FLatten and Agent exempt vectors and names that end in .bias; their tables and temperatures are neither."""
    model = small(name)
    exempt, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(parameter) for parameter in decayed["params"]}
    tables = [p for key, p in model.named_parameters() if key.endswith(("positional_encoding", "scale", "n_bias"))]
    assert tables
    assert all(id(table) in decayed for table in tables)
    assert any(parameter is model.patch_embed.proj.bias for parameter in exempt["params"])


def test_features_only():
    maps = small("swin_tiny_mala", features_only=True)(image())
    channels = [m.shape[-1] for m in maps]
    assert channels == [24, 48, 96, 192]
    (tokens,) = small("deit_tiny_rala", features_only=True, out_indices=(1,))(image())
    assert tokens.shape == (2, 48, 4, 4)

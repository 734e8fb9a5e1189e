"""Networks whose attention has more around it than DeiT's: norms, gates, rotations, registers, other layouts."""

import copy

import pytest
import torch
from linearize_teachers import SMALL, body, image
from torch.testing import assert_close

from linvit import swap_attention
from linvit.models.slots import ADAPTERS, Slot, Slots, adapter

KEEPING = {
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {}),
    "CLIP": ("vit_base_patch16_clip_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "norms": ("deit_tiny_patch16_224", {"qk_norm": True, "scale_attn_norm": True}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with norms": ("vit_small_patch16_dinov3", {"qk_norm": True, "scale_attn_inner": True}),
    "EVA": ("eva_giant_patch14_224", {}),
    "EVA-02": ("eva02_base_patch14_224", {}),
    "EVA-02 with a bias for keys": ("eva02_tiny_patch14_224", {"qkv_fused": True}),
    "Perception Encoder": ("vit_pe_core_tiny_patch16_384", {}),
    "shared keys": ("vit_small_patch16_dinov3", {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1}),
    "mixed rotation": ("vit_small_patch16_rope_mixed_224", {}),
}


@pytest.mark.parametrize(("name", "kwargs"), KEEPING.values(), ids=KEEPING)
def test_softmax_in_the_place_of_softmax_changes_nothing(name, kwargs):
    model, x = body(name, **{**SMALL, **kwargs}), image()
    swapped = swap_attention(copy.deepcopy(model), "softmax")
    assert_close(swapped(x), model(x), rtol=1e-5, atol=1e-5)
    assert swap_attention(copy.deepcopy(model), "mala", "LS")(x).shape == (2, 5)


@pytest.mark.parametrize(
    "mechanism", ["linear", "rala", "mala", "inline", "mlla", "focused", "efficient", "recnext", "vittt"]
)
def test_a_rotation_is_kept_at_every_size(mechanism):
    model = swap_attention(body("vit_small_patch16_dinov3", dynamic_img_size=True, **SMALL), mechanism)
    wide, tall = model(image()), model(image(48, 32))
    assert not torch.allclose(wide, tall)
    assert torch.equal(model(image()), wide)
    model.rope = None
    assert not torch.allclose(model(image()), wide)


@pytest.mark.parametrize("mechanism", ["hydra", "agent", "polaformer", "polaformer_pp", "nala"])
def test_a_rotation_that_cannot_be_kept(mechanism):
    model = body("vit_small_patch16_dinov3", **SMALL)
    with pytest.raises(ValueError, match=f"`mechanism` '{mechanism}' cannot keep the rotation of the model"):
        swap_attention(model, mechanism)


def sam(**kwargs):
    return body(
        "samvit_base_patch16", **{**SMALL, "img_size": 64, "window_size": 2, "global_attn_indexes": (1,), **kwargs}
    )


def test_sam_sees_its_whole_map():
    model, x = sam(use_rel_pos=False), image(64, 64)
    globally = copy.deepcopy(model)
    globally.blocks[0].window_size = 0
    assert_close(swap_attention(copy.deepcopy(model), "softmax")(x), globally(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(swap_attention(sam(), "mala", "S")(x), sam()(x))
    assert swap_attention(sam(), "mala")(x).isfinite().all()


def hiera():
    return body("hiera_tiny_224", img_size=64, embed_dim=16, num_heads=1, stages=(1, 2, 2, 1), num_classes=5)


def test_hiera_keeps_the_blocks_that_pool():
    model, x = hiera(), image(64, 64)
    globally = copy.deepcopy(model)
    for block in globally.blocks:
        if block.attn.q_stride == 1:
            block.attn.use_mask_unit_attn = False
    assert_close(swap_attention(copy.deepcopy(model), "softmax", "LLLL")(x), globally(x), rtol=1e-5, atol=1e-5)
    swapped = swap_attention(copy.deepcopy(model), "rala", "SLLS")
    assert [type(block.attn).__name__ for block in swapped.blocks] == [
        *["MaskUnitAttention", "MaskUnitAttention", "FlatAttention", "MaskUnitAttention", "FlatAttention"],
        "MaskUnitAttention",
    ]
    assert swapped(x).isfinite().all()
    for mechanism in ("linear", "mala", "hydra", "polaformer", "polaformer_pp", "nala"):
        assert swap_attention(hiera(), mechanism)(x).isfinite().all()


@pytest.mark.parametrize(
    ("mechanism", "attention", "message"),
    [
        ("inline", None, "`mechanism` 'inline' has local terms, but the tokens of the model are not in the order"),
        ("enhanced", None, "`mechanism` 'enhanced' has local terms"),
        ("recnext", None, "`mechanism` 'recnext' has local terms"),
        ("vittt", None, "`mechanism` 'vittt' has local terms"),
        ("polaformer", {"positions": True}, "`attention` has 'positions', but the tokens of the model are not in the"),
        ("mala", {"lepe": True}, "`attention` has 'lepe', but the tokens of the model are not in the order"),
    ],
)
def test_tokens_in_no_order_have_no_neighbours(mechanism, attention, message):
    with pytest.raises(ValueError, match=message):
        swap_attention(hiera(), mechanism, attention=attention)


def naflex(**kwargs):
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "patch_size": 8}
    return body("naflexvit_base_patch16_gap", **{**sizes, **kwargs})


@pytest.mark.parametrize("kwargs", [{}, {"rope_type": "axial"}], ids=["plain", "rotated"])
def test_naflex_reads_images_of_any_shape(kwargs):
    model = naflex(**kwargs)
    swapped = swap_attention(copy.deepcopy(model), "softmax")
    for size in ((32, 48), (40, 16)):
        assert_close(swapped(image(*size)), model(image(*size)), rtol=1e-5, atol=1e-5)
    mala = swap_attention(copy.deepcopy(model), "mala")
    assert not torch.allclose(mala(image(32, 48)), mala(image(48, 32)))


class Tiny(torch.nn.Module):
    """A network of somebody else."""

    def __init__(self):
        super().__init__()
        self.block = torch.nn.Module()
        self.block.qkv, self.block.attn = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, tokens):
        return self.block.attn(tokens)


def test_an_adapter_of_a_few_lines(monkeypatch):
    monkeypatch.setattr("linvit.models.slots.ADAPTERS", dict(ADAPTERS))

    @adapter(Tiny)
    def slots(model):
        about = {"qkv": lambda: model.block.qkv, "proj": model.block.attn, "proj_drop": torch.nn.Identity()}
        return Slots([Slot(block=model.block, heads=2, grid=(2, 3), letter=0, **about)], 1)

    swapped = swap_attention(Tiny(), "rala")
    assert swapped.block.attn.operator.mechanism == "rala"
    assert swapped(torch.randn(1, 6, 8)).shape == (1, 6, 8)

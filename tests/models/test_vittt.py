"""ViT³'s own networks: any image, class tokens, fusing."""

import pytest
import timm
import torch
from fused_networks import error, randomised
from torch.testing import assert_close

import linvit
from linvit.layers.swapped import LocalBlock

SMALL = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def small(**options):
    return randomised(timm.create_model("vit_ttt_tiny", **{**SMALL, **options})).eval()


def image(height=32, width=48):
    return torch.randn(2, 3, height, width)


def test_every_block_convolves_before_its_attention():
    model, x = small(), image()
    assert model.pattern == "L"
    block, tokens = model.blocks[0], torch.randn(2, 24, 32)
    local = block.cpe(tokens.mT.unflatten(-1, (4, 6))).flatten(2).mT
    middle = tokens + local
    middle = middle + block.attn(block.norm1(middle), [4, 6])
    assert_close(block(tokens), middle + block.mlp(block.norm2(middle)))
    features = model.forward_features(x)
    assert_close(model(x), model.head(features.mean(1)))
    assert model.pos_embed is None
    assert isinstance(block, LocalBlock)


def test_any_size_of_images():
    model = small(dynamic_img_size=True)
    x = image()
    wide, tall = model(x), model(x.mT)
    assert wide.shape == tall.shape == (2, 5)
    assert not torch.allclose(wide, tall)
    assert torch.equal(model(x), wide)


def test_a_class_token_is_not_convolved():
    model = small(class_token=True, global_pool="token")
    seen = []
    model.blocks[0].norm1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = torch.randn(1, 25, 32)
    model.blocks[0](tokens)
    assert torch.equal(seen[0][:, 0], tokens[:, 0])
    assert not torch.allclose(seen[0][:, 1:], tokens[:, 1:])
    assert model(image()).shape == (2, 5)


def test_fused_networks_compute_the_same():
    model, x = small(init_values=0.5).double(), image().double()
    fused = linvit.fuse(model)
    with torch.inference_mode():
        assert error(fused(x), model(x)) < 1e-10
    norms = [name for name, m in fused.named_modules() if isinstance(m, torch.nn.LayerNorm) and m.elementwise_affine]
    assert norms == ["norm"]


@pytest.mark.slow
def test_exports():
    model, x = small(), image()
    assert_close(torch.export.export(model, (x,)).module()(x), model(x))

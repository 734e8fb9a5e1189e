"""Swapped NaFlexVits with images of different sizes in one batch: each image as alone."""

import pytest
import timm
import torch

from linvit import swap_attention
from linvit.layers.grid import ImagePatches

SMALL = {"num_classes": 5, "embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
NETWORKS = {
    "pooled": ("naflexvit_base_patch16_gap", {}),
    "registers": ("naflexvit_base_patch16_gap", {"class_token": True, "reg_tokens": 3}),
    "axial rotation": ("naflexvit_base_patch16_gap", {"rope_type": "axial", "reg_tokens": 2}),
    "mixed rotation": ("naflexvit_base_patch16_gap", {"rope_type": "mixed"}),
    "factorized": ("naflexvit_base_patch16_parfac_gap", {}),
    "no positions": ("naflexvit_base_patch16_gap", {"pos_embed": "none", "reg_tokens": 2}),
    "attention pool": ("naflexvit_base_patch16_siglip", {}),
}
MECHANISMS = ["rala", "mala", "linear", "hydra", "mlla", "polaformer", "polaformer_pp", "nala"]
OPTIONS = {"polaformer": {"attention": {"positions": False}}}
NOT_ROTATED = ("hydra", "polaformer", "polaformer_pp", "nala")  # which keep no rotation
SIZES = ((56, 40), (8, 72), (24, 24), (8, 8))


def network(name="pooled", mechanism="rala", dtype=torch.float64, **options):
    model, kwargs = NETWORKS[name]
    torch.manual_seed(0)
    network = swap_attention(timm.create_model(model, **SMALL, **kwargs).to(dtype), mechanism, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return network.eval()


def images(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, *size, generator=generator, dtype=dtype) for size in SIZES]


def patches(images, side=8):
    """timm's dictionary; what is padded is large, so that it shows wherever it is read."""
    sizes = [(image.shape[1] // side, image.shape[2] // side) for image in images]
    longest = max(height * width for height, width in sizes)
    rows = torch.full((len(images), longest, side * side * 3), 100.0, dtype=images[0].dtype)
    coord = torch.zeros(len(images), longest, 2, dtype=torch.long)
    valid = torch.zeros(len(images), longest, dtype=torch.bool)
    for i, (image, (height, width)) in enumerate(zip(images, sizes, strict=True)):
        count = height * width
        tiles = image.unflatten(2, (width, side)).unflatten(1, (height, side))
        rows[i, :count] = tiles.permute(1, 3, 2, 4, 0).reshape(count, -1)
        coord[i, :count] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        valid[i, :count] = True
    return {"patches": rows, "patch_coord": coord, "patch_valid": valid}


EVERY = [
    (name, mechanism)
    for name in NETWORKS
    for mechanism in MECHANISMS
    if "rotation" not in name or mechanism not in NOT_ROTATED
]
SLOW = [(name, mechanism) for name, mechanism in EVERY if name != "registers" and mechanism != "rala"]


@pytest.mark.parametrize(
    ("name", "mechanism"), [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ()) for case in EVERY]
)
def test_a_batch_is_each_image_alone(name, mechanism):
    model = network(name, mechanism, **OPTIONS.get(mechanism, {}))
    given = images()
    with torch.no_grad():
        batch = model(patches(given))
        for logits, image in zip(batch, given, strict=True):
            torch.testing.assert_close(logits, model(patches([image]))[0], rtol=0, atol=1e-12)
            if name != "axial rotation":  # timm computes this table in float32 for images
                torch.testing.assert_close(logits, model(image[None])[0], rtol=0, atol=1e-12)
        assert (batch[0] - batch[1]).abs().max() > 1e-3


def test_gradients_are_the_sums_of_those_alone():
    model, given = network("no positions"), images()  # timm interpolates a table of positions in float32
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(patches(given)).square().sum(), parameters)
    alone = [torch.autograd.grad(model(image[None]).square().sum(), parameters) for image in given]
    for x, *y in zip(together, *alone, strict=True):
        torch.testing.assert_close(x, sum(y), rtol=1e-11, atol=1e-12)


def test_only_some_blocks_and_images_after_patches():
    model, given = network(pattern="SL"), images()
    with torch.no_grad():
        batch = model(patches(given))
        for logits, image in zip(batch, given, strict=True):
            torch.testing.assert_close(logits, model(image[None])[0], rtol=0, atol=1e-12)


def test_patches_may_come_in_any_order():
    model, (image, *_) = network("no positions"), images()  # timm adds its positions in the order of rows
    given = patches([image, image.flip(2)])
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        batch = model({name: x[:, order] for name, x in given.items()})
        torch.testing.assert_close(batch, model(torch.stack((image, image.flip(2)))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision(dtype):
    model, exact = network(dtype=dtype), network()
    exact.load_state_dict({key: x.double() for key, x in model.state_dict().items()})
    given = images(dtype)
    with torch.no_grad():
        expected = torch.cat([exact(image[None].double()) for image in given])
        alone = torch.cat([model(image[None]) for image in given])
        assert (model(patches(given)) - expected).norm() <= 1.5 * (alone - expected).norm()


@pytest.mark.parametrize(
    "mechanism",
    [
        *("focused", "inline", "agent", "linear_angular", "softmax", "enhanced", "efficient"),
        *("polaformer", "recnext", "vittt"),
    ],
)
def test_mechanisms_of_one_grid_refuse_patches(mechanism):
    model = network(mechanism=mechanism)
    with pytest.raises(ValueError, match=r"patches with coordinates, but .* needs one grid|no `cu_seqlens`"):
        model(patches(images()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"patch_valid": torch.ones(4, 9, dtype=torch.bool)},
            r"`patch_valid` is torch.bool of shape \(4, 9\), expected",
        ),
        ({"patch_valid": torch.ones(4, 35)}, r"`patch_valid` is torch.float32 of shape \(4, 35\), expected bool"),
        ({"patch_coord": torch.zeros(4, 35)}, r"`patch_coord` is torch.float32 of shape \(4, 35\), expected whole"),
        (
            {"patch_coord": torch.zeros(4, 9, 2).long(), "patch_valid": torch.ones(4, 9) > 0},
            r"`patch_coord` has shape \(4, 9, 2\) for patches of shape \(4, 35, 192\), expected a row and a column",
        ),
    ],
)
def test_wrong_shapes_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        network()({**patches(images()), **change})


def test_packed_tokens_come_back():
    given = patches(images())
    known = ImagePatches(given["patch_coord"], given["patch_valid"], 2)
    x = torch.randn(4, 37, 6)
    assert known.grid == (7, 9)
    assert known.cu_seqlens.tolist() == [0, 37, 48, 59, 62]
    assert torch.equal(known.padded(known.packed(x)), x * known.valid.unsqueeze(-1))
    maps = known.on_maps(known.packed(x))
    assert torch.equal(maps[1, :, 0, :9], x[1, 2:11].T)
    assert maps[1, :, 1:].eq(0).all()
    expected = known.packed(x).clone()
    expected[0, [0, 1, 37, 38, 48, 49, 59, 60]] = 0
    assert torch.equal(known.off_maps(maps), expected)

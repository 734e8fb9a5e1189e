import math
import os
import re
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tiers import quick
from torch import nn
from torch.testing import assert_close

import linvit
from linvit.analysis.probe import probe
from linvit.data.images.image import open_image as open_whole_image
from linvit.files import locked
from linvit.layers.operator import Operator
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.segmentors import SemanticFPN, UperNet
from linvit.streaming import Query, run_in_strips
from linvit.streaming.images import open_image
from linvit.streaming.journal import Journal

float64 = torch.float64
PATTERNS = {"mavit_nano": "LLLL", "ravlt_nano": "LLLL", "care_nano": "CCLL"}
NALAFORMER = {"widths": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "heads": (1, 2, 3, 4), "final_width": 16}
"""Its blocks have a second convolution, and its operator reads signed queries and keys."""


def drawn(network):
    """The network with weights of ordinary size, so that every layer counts."""
    torch.manual_seed(0)
    for p in network.parameters():
        nn.init.kaiming_normal_(p) if p.ndim == 4 and len(p) > 1 else nn.init.normal_(p, std=0.3)
    return network.double().eval()


def created(name, **arguments):
    arguments |= NALAFORMER if name == "nalaformer_tiny" else {}
    return drawn(timm.create_model(name, pattern=PATTERNS.get(name, "LLLL"), num_classes=5, **arguments))


def images(height, width, batch=2):
    return torch.randn(batch, 3, height, width, dtype=float64, generator=torch.Generator().manual_seed(1))


def assert_same(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


def whole(stored):
    return stored.read(0, stored.shape[2])


@pytest.mark.parametrize("name", [*PATTERNS, "nalaformer_tiny"])
@pytest.mark.parametrize("size", quick([(64, 96), (133, 70)], [(133, 70)]))
@pytest.mark.parametrize("rows", quick([1, 40, None], [40]))
def test_it_equals_the_ordinary_forward(name, size, rows):
    network, x = created(name), images(*size)
    streamed = run_in_strips(network, x, rows=rows, keep=["maps", "scores"])
    with torch.no_grad():
        assert_same(streamed.logits, network(x))
        expected = network.forward_intermediates(x, intermediates_only=True)
        last = network.forward_features(x)
    for stride, stage in zip((4, 8, 16, 32), expected, strict=True):
        assert_same(whole(streamed.maps[stride]), stage)
    network.global_pool = "avg"
    positions = last.permute(0, 2, 3, 1).flatten(0, 2)[..., None, None]
    with torch.no_grad():
        logits = network.forward_head(positions).view(len(x), *last.shape[2:], 5).permute(0, 3, 1, 2)
    assert_same(whole(streamed.maps["scores"]), logits)


def test_maps_that_do_not_fit_are_on_disk(tmp_path):
    network, x = created("mavit_nano"), images(70, 64)
    streamed = run_in_strips(network, x, rows=32, memory=1e-9, spill=tmp_path, keep=["maps"])
    assert_same(streamed.logits, network(x).detach())
    assert sorted(file.name for file in tmp_path.glob("*.map")) == sorted(
        f"{name}.map" for name in ("stages.0.blocks.0", "stages.1.blocks.0", "stages.2.blocks.1", "stages.3.blocks.0")
    )
    in_memory = run_in_strips(network, x, memory=1e-9, keep=["maps"])
    assert in_memory.strips > streamed.strips
    for stride, stored in streamed.maps.items():
        assert_same(whole(in_memory.maps[stride]), whole(stored))


@pytest.mark.parametrize("name", quick(PATTERNS, ["ravlt_nano"]))
@pytest.mark.parametrize("rows", quick([32, None], [32]))
def test_segmentors_and_their_backbones(name, rows):
    backbone = DenseBackbone(name, pattern=PATTERNS[name])
    x = images(96, 70)
    for network in (SemanticFPN(backbone, 4, 16), UperNet(backbone, 4, 16)):
        drawn(network)
        streamed = run_in_strips(network, x, rows=rows, keep=["scores"])
        with torch.no_grad():
            logits = network(x)
        assert_same(whole(streamed.maps["scores"]), logits)
        assert torch.equal(whole(streamed.maps["labels"]), logits.argmax(1, keepdim=True).to(torch.uint8))
    maps = run_in_strips(backbone, x, rows=rows).maps
    for stride, expected in zip((4, 8, 16, 32), backbone(x), strict=True):
        assert_same(whole(maps[stride]), expected.detach())


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("mavit_nano", "stages.0.blocks.0"),
        ("ravlt_nano", "stages.2.blocks.1"),
        ("care_nano", "stages.2.blocks.0"),
        ("nalaformer_tiny", "stages.1.blocks.0"),
    ],
)
@pytest.mark.parametrize("rows", quick([1, 40, None], [40]))
def test_the_scores_of_a_query(name, block, rows):
    network, x = created(name), images(75, 68)
    row, column = 70, 37
    streamed = run_in_strips(network, x, rows=rows, query=Query(block, row, column))
    (seen,) = (layer for layer in probe(network, x) if layer.name.startswith(block))
    (height, width), stride = seen.grid, 4 * 2 ** int(block[7])
    place = min(row // stride, height - 1) * width + min(column // stride, width - 1)
    assert_same(whole(streamed.maps["query"]).flatten(2), seen.scores()[:, :, place])


class Lazy:
    """A reader of rows that counts them, and that can fail."""

    def __init__(self, images, left=math.inf):
        self.images, self.left, self.longest, self.shape = images, left, 0, tuple(images.shape)

    def read(self, start, stop):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        self.longest = max(self.longest, stop - start)
        return self.images[:, :, start:stop]


def test_readers_of_rows(monkeypatch):
    monkeypatch.setattr("linvit.streaming.computation.INTERVAL", 0.0)
    network, x, lines = created("mavit_nano"), images(300, 64), []
    reader = Lazy(x)
    assert_same(run_in_strips(network, reader, rows=32, progress=lines.append).logits, network(x).detach())
    assert reader.longest <= 64
    assert re.fullmatch(r"stem \(1 of \d+ steps\); about \d+ (s|min) left", lines[0])


class InterruptError(Exception):
    pass


@pytest.mark.parametrize("keep", quick([[], ["maps", "scores"]], [["maps", "scores"]]))
def test_it_goes_on_after_any_interruption(tmp_path, keep, monkeypatch):
    network, x = created("ravlt_nano"), images(70, 64)
    expected = run_in_strips(network, x, rows=32, keep=keep)
    calls = iter(range(10**6))
    forward = Operator.forward

    def interrupted(*arguments, **options):
        if next(calls) % 5 == 4:
            raise InterruptError
        return forward(*arguments, **options)

    monkeypatch.setattr(Operator, "forward", interrupted)
    interruptions, streamed = 0, None
    while streamed is None:
        try:
            streamed = run_in_strips(network, x, rows=32, keep=keep, spill=tmp_path)
        except InterruptError:
            interruptions += 1
    assert interruptions > 3
    assert torch.equal(streamed.logits, expected.logits)
    for key, stored in expected.maps.items():
        assert torch.equal(whole(streamed.maps[key]), whole(stored))
    again = run_in_strips(network, x, rows=32, keep=keep, spill=tmp_path)
    assert again.strips == 0
    assert torch.equal(again.logits, expected.logits)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_spill_folder_belongs_to_one_network_and_one_image(tmp_path):
    network, x = created("mavit_nano"), images(70, 64)
    run_in_strips(network, x, rows=32, spill=tmp_path)
    other = created("mavit_nano", attention={"normalizer": "sum"})
    other.load_state_dict(network.state_dict())
    flat = drawn(timm.create_model("mavit_nano", pattern="LLLL", num_classes=5))
    flat.stages[2].blocks[1].norm1.eps *= 2
    changed, last = x.clone(), x.clone()
    changed[:, :, 1:3], last[..., -1, -1] = 3.0, 3.0
    computations = ((other, x), (flat, x), (network, changed), (network, last), (network, Lazy(changed)))
    for network_of, image in computations:
        with pytest.raises(ValueError, match="has the progress of another computation"):
            run_in_strips(network_of, image, rows=32, spill=tmp_path)
    assert run_in_strips(network, Lazy(x), rows=32, spill=tmp_path).strips == 0


def test_a_spill_folder_belongs_to_one_file(tmp_path):
    network, file, spill = timm.create_model("mavit_nano.cifar10").eval(), tmp_path / "image.png", tmp_path / "spill"
    pixels = np.random.default_rng(0).integers(0, 256, (70, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, compress_level=0)
    expected = run_in_strips(network, file, rows=32, spill=spill).logits
    assert torch.equal(run_in_strips(network, file, rows=32, spill=spill).logits, expected)
    pixels[1:3] = 0
    Image.fromarray(pixels).save(file, compress_level=0)
    with pytest.raises(ValueError, match="has the progress of another computation"):
        run_in_strips(network, file, rows=32, spill=spill)


@pytest.fixture(scope="module")
def spilled(tmp_path_factory):
    """A network, images, and the folder with the progress of their computation."""
    network, x, folder = created("mavit_nano"), images(64, 64), tmp_path_factory.mktemp("spilled")
    run_in_strips(network, x, spill=folder)
    return network, x, folder


@pytest.mark.parametrize(
    "damage",
    [
        *({name: None} for name in ("step", "strips", "shapes", "totals", "pool", "logits", "digest")),
        *({"strips": strips} for strips in (-1, 10**9, 1.5, "1")),
        {"step": 10**9},
        {"pool": (torch.ones(2, 128), torch.ones(2))},
        {"logits": torch.zeros(2, 5)},
        {"totals": [torch.ones(1)]},
        {"shapes": {}},
        {"digest": torch.ones(3)},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_journal_is_refused(spilled, tmp_path, damage):
    network, x, folder = spilled
    spill = shutil.copytree(folder, tmp_path / "spill")
    journal = torch.load(spill / "progress.pt", weights_only=True)
    changed = {name: value for name, value in (journal | damage).items() if value is not None}
    torch.save(changed, spill / "progress.pt")
    with pytest.raises(ValueError, match=r"progress\.pt is damaged: remove the folder"):
        run_in_strips(network, x, spill=spill)


@pytest.mark.parametrize("damage", ["changed", "cut", "long", "missing", "pipe", "link", "folder"])
@pytest.mark.parametrize("interrupted", quick([True, False], [False]))
def test_a_damaged_map_is_refused(tmp_path, damage, interrupted, monkeypatch):
    network, x = created("mavit_nano"), images(128, 64)
    if interrupted:
        calls = iter(range(10**6))
        note = Journal.note

        def noted(self, *arguments):
            note(self, *arguments)
            if next(calls) == 5:
                raise InterruptError

        monkeypatch.setattr(Journal, "note", noted)
        with pytest.raises(InterruptError):
            run_in_strips(network, x, rows=32, keep=["maps"], spill=tmp_path)
    else:
        run_in_strips(network, x, rows=32, keep=["maps"], spill=tmp_path)
    for file in tmp_path.glob("*.map"):
        content = file.read_bytes()
        file.unlink()
        if damage == "changed":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif damage in ("cut", "long"):
            file.write_bytes(content[:-1] if damage == "cut" else content + b"x")
        elif damage == "pipe":
            os.mkfifo(file)
        elif damage == "link":
            (tmp_path / f"{file.name}.moved").write_bytes(content)
            file.symlink_to(tmp_path / f"{file.name}.moved")
        elif damage == "folder":
            file.mkdir()
    with pytest.raises(ValueError, match=r"\.map is missing or damaged, expected a map of .* bytes: remove the folder"):
        run_in_strips(network, x, rows=32, keep=["maps"], spill=tmp_path)


def test_a_folder_with_the_name_of_a_map_is_refused(tmp_path):
    (tmp_path / "stem.map").mkdir()
    with pytest.raises(ValueError, match=r"stem\.map is a folder, not a file"):
        run_in_strips(created("mavit_nano"), images(64, 64), spill=tmp_path)


def test_one_process_computes_in_a_spill_folder(tmp_path):
    network, x = created("mavit_nano"), images(64, 64)
    (tmp_path / ".progress.pt.12345.tmp").write_bytes(b"of a process that was killed")
    with locked(tmp_path, "busy"), pytest.raises(ValueError, match=r"Another process computes in .*: wait for it"):
        run_in_strips(network, x, spill=tmp_path)
    run_in_strips(network, x, spill=tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def vips():
    return pytest.importorskip("pyvips", reason="needs the extra stream")


@pytest.mark.parametrize("with_vips", [True, False])
def test_pixels_and_files(tmp_path, with_vips, monkeypatch):
    pyvips = vips()
    network = timm.create_model("mavit_nano.cifar10").eval()
    pixels = np.random.default_rng(0).integers(0, 256, (130, 90, 3), np.uint8)
    cfg = network.pretrained_cfg
    mean, std = (torch.tensor(cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = network(((torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std)[None]).detach()
    image = pyvips.Image.new_from_array(pixels)
    files = {"pyramid.tif": {"tile": True, "pyramid": True, "tile_width": 64, "tile_height": 64, "compression": "lzw"}}
    files |= {"strips.tiff": {}, "image.png": {}}
    for name, options in files.items():
        image.write_to_file(tmp_path / name, **options)
    if not with_vips:
        monkeypatch.setitem(sys.modules, "pyvips", None)
    for name in files:
        assert_close(run_in_strips(network, tmp_path / name, rows=32).logits, expected)
    assert_close(run_in_strips(network, pixels, rows=32).logits, expected)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"has no room for a map of .* GiB \(No space left on device\): choose another"):
        run_in_strips(created("mavit_nano"), images(64, 64), spill=tmp_path)
    assert not list(tmp_path.glob("*.map"))


def nano(**options):
    return timm.create_model("mavit_nano", **options).eval()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": lambda: nano().train()}, "is in training mode, expected evaluation mode"),
        (
            {"network": partial(nano, pattern="LLLS")},
            "stages.3.blocks.0.attn.operator is softmax attention, which needs all tokens at once",
        ),
        (
            {"network": partial(nano, attention={"weighting": "learned"})},
            "has the weighting 'learned', which cannot be computed strip by strip",
        ),
        (
            {"network": lambda: timm.create_model("resnet10t").eval()},
            "`network` is a ResNet, expected a RAVLT, MAViT",
        ),
        (
            {
                "network": lambda: SemanticFPN(DenseBackbone("mavit_nano"), 4, 16).eval(),
                "image": torch.zeros(1, 3, 65, 64),
            },
            "The image is 65 px high, expected a multiple of 32 for a segmentor",
        ),
        (
            {"network": lambda: linvit.fuse(nano())},
            "The block stages.0.blocks.0 is a FusedAttentionBlock, .* before `linvit.fuse`",
        ),
        ({"network": partial(nano, global_pool="max")}, "The pooling of `network` is 'max', expected an average"),
        ({"network": lambda: nano().to("meta")}, r"`network` is on meta, expected the CPU"),
        ({"network": lambda: nn.Identity().eval()}, r"`network` is on no device, expected the CPU"),
        (
            {"image": torch.zeros(3, 64, 64)},
            r"`image` is torch.float32 of shape \(3, 64, 64\), expected floating point",
        ),
        ({"image": torch.zeros(1, 3, 64, 31)}, "expected sides of at least 32 px"),
        ({"image": torch.zeros(1, 1, 64, 64)}, "expected"),
        ({"image": np.zeros((64, 64), np.uint8)}, r"expected 8-bit pixels \(height, width, 3\)"),
        ({"image": "missing.tif"}, "There is no image at missing.tif"),
        (
            {"image": torch.zeros(1, 3, 64, 64, dtype=float64)},
            "of torch.float64 and .*, expected torch.float32, as the",
        ),
        ({"image": torch.zeros(1, 3, 64, 64).to("meta")}, "on meta, expected"),
        ({"image": torch.zeros(1, 3, 64, 64).to_sparse()}, "`image` is a sparse_coo tensor, expected a dense one"),
        ({"image": "image\0.png"}, r"'image\\x00.png' has a NUL character"),
        ({"rows": 0}, "`rows` is 0, expected"),
        ({"memory": 0}, "`memory` is 0, expected"),
        ({"keep": ["logits"]}, "'logits'"),
        ({"progress": None}, "`progress` is null, expected a function"),
        ({"spill": 5}, "`spill` is 5, expected text"),
        ({"spill": "a\0b"}, r"'a\\x00b' has a NUL character"),
        ({"query": ("stages.0.blocks.0", 0, 0)}, "`query` is .*, expected a Query, or null"),
        ({"query": Query("stages.9", 0, 0)}, "`query` names 'stages.9', expected one of stages.0.blocks.0"),
        (
            {"query": Query("stages.0.blocks.0", 64, 0)},
            "`query` is at row 64 and column 0, but the image is 64 × 64 px",
        ),
    ],
)
def test_one_sentence_for_each_mistake(arguments, message):
    given = {"network": nano, "image": torch.zeros(1, 3, 64, 64)} | arguments
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_in_strips(given.pop("network")(), **given)


@pytest.mark.parametrize(
    ("kind", "read", "message"),
    [
        (
            ValueError,
            lambda x, a, b: x[:, :, a : b + 1],
            r"rows 0 to 39 of torch.float32 and shape \(1, 3, 41, 64\) on cpu, expected",
        ),
        (ValueError, lambda x, a, b: x[:, :, a:b].double(), "torch.float64 and .*, expected torch.float32"),
        (ValueError, lambda x, a, b: x[:, :, a:b].to("meta"), r"on meta, expected .* on the CPU"),
        (TypeError, lambda x, a, b: x[:, :, a:b].numpy(), "rows of type ndarray, expected a tensor"),
    ],
)
def test_a_reader_must_return_the_rows_that_the_network_reads(kind, read, message):
    reader = Lazy(torch.zeros(1, 3, 64, 64))
    reader.read = lambda start, stop: read(reader.images, start, stop)
    with pytest.raises(kind, match=message):
        run_in_strips(nano(), reader, rows=32)


def test_a_query_is_at_whole_numbers():
    with pytest.raises(ValueError, match=r"`row` is 1.5, expected a whole number of 0 or more"):
        Query("stages.0.blocks.0", 1.5, 0)


def test_fast_pooling_is_an_average():
    network = timm.create_model("mavit_nano", global_pool="fast").double().eval()
    assert_same(run_in_strips(network, images(64, 70), rows=32).logits, network(images(64, 70)).detach())


@pytest.mark.parametrize(
    ("bands", "dtype", "colours"), [(3, np.float32, "scrgb"), (9, np.uint16, "multiband"), (3, np.uint16, "rgb16")]
)
def test_bands_that_are_no_colours(tmp_path, bands, dtype, colours):
    pyvips = vips()
    network, file = nano(), tmp_path / "image.tif"
    pixels = np.random.default_rng(0).integers(0, 256, (70, 64, bands), np.uint8)
    changed = (pixels * np.float32(257)).astype(dtype)
    pyvips.Image.new_from_array(changed, interpretation=colours).write_to_file(file)
    if colours == "rgb16":
        assert_close(run_in_strips(network, file).logits, run_in_strips(network, pixels).logits)
        return
    with pytest.raises(ValueError, match=r"image.tif has \d bands of the format .*, expected grey or RGB of 8 or 16"):
        run_in_strips(network, file)


@pytest.mark.parametrize("ending", ["tif", "jpg", "png", "webp", "gif", "avif", "bmp", "tga", "jp2"])
@pytest.mark.parametrize("mode", quick(["RGB", "L", "CMYK", "P", "1", "I;16", "RGBA"], ["RGB", "CMYK", "I;16"]))
def test_files_have_the_pixels_that_they_have_in_training(tmp_path, mode, ending):
    vips()
    colours = np.random.default_rng(0).integers(0, 256, (70, 64, 3), np.uint8)
    wide = Image.fromarray(colours[..., 0].astype(np.uint16) * 250)
    file = tmp_path / f"image.{ending}"
    try:
        (wide if mode == "I;16" else Image.fromarray(colours).convert(mode)).save(file)
    except (OSError, ValueError):
        return  # no format has all modes
    for channels in (1, 3):
        mean = (0.5,) * channels
        rows = open_image(file, {"mean": mean, "std": mean}, torch.float32).read(0, 70)[0].permute(1, 2, 0)
        expected = np.asarray(open_whole_image(file, channels)).reshape(70, 64, channels)
        assert np.array_equal(((rows.numpy() * 0.5 + 0.5) * 255).round(), expected)


def test_grey_networks_read_grey_without_libvips_too(tmp_path, monkeypatch):
    network, file = timm.create_model("mavit_nano", in_chans=1).eval(), tmp_path / "image.png"
    network.pretrained_cfg = {"mean": (0.4,), "std": (0.2,)}
    pixels = np.random.default_rng(0).integers(0, 256, (70, 64, 1), np.uint8)
    Image.fromarray(pixels[..., 0]).save(file)
    monkeypatch.setitem(sys.modules, "pyvips", None)
    assert_close(run_in_strips(network, file).logits, run_in_strips(network, pixels).logits)


def test_without_libvips_the_sentence_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyvips", None)
    (tmp_path / "image.xyz").write_bytes(b"of a format that Pillow does not know")
    with pytest.raises(ValueError, match=r"replace or remove the file, or install pyvips.*'linvit\[stream\]'`\.$"):
        run_in_strips(nano(), tmp_path / "image.xyz")


@pytest.mark.parametrize("name", ["image.tif", "image.png"])
def test_damaged_files(tmp_path, name):
    vips()
    network = nano()
    (tmp_path / name).write_bytes(b"II*\0" + bytes(40))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name} is not a readable image (")):
        run_in_strips(network, tmp_path / name)


def test_a_damaged_tile(tmp_path):
    pyvips = vips()
    network, file = nano(), tmp_path / "image.tif"
    pixels = np.random.default_rng(0).integers(0, 256, (512, 96, 3), np.uint8)
    options = {"tile": True, "tile_width": 64, "tile_height": 64, "compression": "deflate"}
    pyvips.Image.new_from_array(pixels).write_to_file(file, **options)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(2_000) + content[middle + 2_000 :])
    with pytest.raises(ValueError, match=r"The rows .* of .*image.tif cannot be read .*: replace the file"):
        run_in_strips(network, file, rows=32, spill=tmp_path / "spill")
    file.write_bytes(content)
    assert_close(run_in_strips(network, file, rows=32).logits, run_in_strips(network, pixels).logits)


def test_a_network_is_unchanged_afterwards():
    network, x = created("mavit_nano"), images(64, 64)
    before = network(x).detach()
    with pytest.raises(KeyboardInterrupt):
        run_in_strips(network, Lazy(x, left=6), rows=1)
    assert torch.equal(network(x), before)
    assert linvit.run_in_strips is run_in_strips

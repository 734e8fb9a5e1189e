"""`linvit bench model` on nano networks and small images."""

from dataclasses import replace

import pytest
import timm
import torch
from tiers import slow

from evidence.published import PUBLISHED
from linvit import export
from linvit.bench import networks, rows
from linvit.bench.exactness import WrongResultError
from linvit.bench.inference import check_options, findings, measure
from linvit.bench.networks import Case, create, images, randomised, variant_call
from linvit.bench.options import PEERS, NetworkOptions
from linvit.bench.rows import Progress, Report, Row
from linvit.deploy.formats import opened

NANO = {"names": ("ravlt_nano",), "peers": ("resnet10t",), "sizes": ((32, 48),), "rounds": 1}


class TurnClock:
    """The first call of a round takes 1 ms, the second 2 ms, and so on."""

    name = "fixed"

    def __init__(self):
        self.calls = []

    def prepared(self, call):
        self.calls.append(call)
        return call

    def seconds(self, call, repeats):
        return 0.001 * (1 + self.calls.index(call))


def measured(**options):
    report = Report("model")
    measure(NetworkOptions(**{**NANO, **options}), report, Progress())
    return report


def test_rows_and_ratios_on_a_fixed_clock(monkeypatch):
    monkeypatch.setattr(rows, "clock_for", lambda *_: TurnClock())
    variants = ("plain", "reference", "fused", "channels_last")
    timed = measured(variants=variants, peer_variants=("plain", "reference")).rows
    assert [(row.name, row.variant) for row in timed] == [
        *(("ravlt_nano", variant) for variant in ("plain", "reference", "fused", "channels_last")),
        ("resnet10t", "plain"),
    ]
    assert [row.median_ms for row in timed] == pytest.approx([1, 2, 3, 4, 5])
    assert [row.ratio for row in timed] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1])
    assert [row.base for row in timed] == ["ravlt_nano plain float32"] * 4 + ["resnet10t plain float32"]
    assert timed[2].against["resnet10t plain"] == pytest.approx(5 / 3)
    assert timed[2].against["reference"] == pytest.approx(2 / 3)
    assert [row.pattern for row in timed] == ["LLLL"] * 4 + [None]
    assert timed[0].size == (32, 48)
    assert 0 < timed[1].error < 1e-5


def test_networks_of_a_fixed_size_are_built_for_the_size_that_is_measured():
    for name in ("deit_tiny_linear", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"):
        assert create(name, (64, 96)).patch_embed.img_size == (64, 96)


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano", *slow("mavit_nano", "fastvit_t8")])
def test_bf16_and_fused_pass_their_checks(name):
    report = measured(names=(), peers=(name,), peer_variants=("fused", "fused+bf16"), sizes=((64, 64),))
    assert [row.dtype for row in report.rows] == ["float32", "bfloat16"]
    assert all(row.median_ms > 0 for row in report.rows)


def test_a_wrong_variant_is_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(networks, "fuse", lambda network, **_: randomised(network, seed=2))
    monkeypatch.setattr(rows, "interleave", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match=r"ravlt_nano fused at 32 × 48, batch 1 .* error is \d"):
        measured()


def test_a_wrong_peer_keeps_its_row_without_a_speed(monkeypatch):
    monkeypatch.setattr(networks, "fuse", lambda network, **_: randomised(network, seed=2))
    ours, plain, fused = measured(variants=("plain",)).rows
    assert "resnet10t fused at 32 × 48, batch 1 computes a wrong result" in fused.skipped
    assert fused.median_ms is None
    assert ours.median_ms > 0
    assert plain.median_ms > 0


def test_what_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr("linvit.deploy.formats.find_spec", lambda name: None)
    rows = measured(variants=("plain", "onnxruntime", "openvino"), peers=())
    skipped = {row.variant: row.skipped for row in rows.rows}
    assert skipped["plain"] is None
    assert skipped["onnxruntime"].startswith("ONNX needs onnx, onnxscript, onnxruntime: install it")
    assert skipped["openvino"].startswith("OpenVINO needs onnx, onnxscript, openvino: install it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [
        ("openvino", 1e-4),
        ("onnxruntime", 1e-4),
        ("openvino+bf16", 0.1),
        ("executorch", 1e-4),
    ],
)
def test_other_runtimes_give_the_same(variant, tolerance):
    network = randomised(timm.create_model("ravlt_nano", num_classes=5, depths=(1, 1, 1, 1)))
    case = Case("ravlt_nano", variant, (64, 48), 1)
    with torch.inference_mode():
        expected = network(images(case))
        (got,) = variant_call(network, images(case), case)()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.slow
def test_an_exported_file_is_timed_beside_the_networks(tmp_path):
    network = timm.create_model("ravlt_nano", num_classes=5, depths=(1, 1, 1, 1))
    file = export(network, tmp_path / "five.onnx", size=32).path
    file.with_suffix(".png").write_bytes(b"of another kind")
    _, timed = measured(variants=("plain", str(file)), peers=(), memory=True).rows
    assert (timed.name, timed.variant, timed.error) == ("five", str(file), None)
    assert timed.median_ms > 0
    assert timed.file_mib == pytest.approx(file.stat().st_size / 2**20)
    assert timed.peak_mib > timed.file_mib / 2


@pytest.mark.slow
def test_the_row_of_a_file_in_8_bits_says_so(tmp_path, monkeypatch):
    def opened_in_8_bits(*given):
        facts, session = opened(*given)
        return replace(facts, calibrated=16), session

    monkeypatch.setattr("linvit.bench.networks.opened", opened_in_8_bits)
    file = export(timm.create_model("resnet10t", num_classes=2), tmp_path / "eight.onnx", dynamic=False, size=32).path
    (row,) = measured(names=(), variants=(str(file),), peers=(), sizes=((32, 32),)).rows
    assert row.dtype == "int8"


def test_a_file_that_cannot_be_timed_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.onnx does not exist"):
        check_options(NetworkOptions(variants=("plain", "gone.onnx")))
    with pytest.raises(ValueError, match=r"'some.onnx', expected one of"):
        check_options(NetworkOptions(peer_variants=("some.onnx",)))
    fixed = export(timm.create_model("resnet10t", num_classes=2), tmp_path / "fixed.pt2", size=32, dynamic=False).path
    with pytest.raises(ValueError, match=r"32×48 px, but .*fixed.pt2 reads 3 and 32×32 px"):
        measured(names=(), variants=(str(fixed),), peers=())
    with pytest.raises(ValueError, match=r"reads one image, but the batch has 2"):
        measured(names=(), variants=(str(fixed),), peers=(), sizes=((32, 32),), batches=(2,))


def test_crossover_is_of_networks_without_softmax_against_those_with_it():
    def curve(name, pattern, power):
        return [
            Row(name, "plain", "float32", 1, 1, size=(side, side), pattern=pattern, median_ms=(side * side) ** power)
            for side in (10, 100)
        ]

    rows = curve("a_linear", "LLLL", 1) + curve("a", "LLSS", 1.5) + curve("swin", None, 2) + curve("resnet", None, 1)
    found = findings(rows)
    assert found["growth"]["a plain float32"] == pytest.approx(1.5)
    assert found["crossover"] == {
        "a_linear plain float32 against a plain float32": 0.0,
        "a_linear plain float32 against swin plain float32": 0.0,
    }


def test_every_peer_is_known_and_has_an_accuracy():
    assert all(timm.is_model(name) for name in PEERS)
    assert set(PEERS) <= PUBLISHED.keys()


def test_two_ways_of_compiling_are_refused():
    variant = "compiled+autotuned"
    (row,) = measured(variants=(variant,), peers=()).rows
    assert row.skipped == (
        "a variant has compiled and autotuned, expected one of compiled, autotuned, graphed, frozen: leave one out"
    )
    assert row.median_ms is None

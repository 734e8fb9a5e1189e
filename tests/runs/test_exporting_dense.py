"""Exported segmentors, detectors and backbones against the networks that they were made from."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

import linvit
from linvit.data.dense.annotations import to_mask
from linvit.data.dense.source import DensePreprocessing
from linvit.deploy import LEAST_SAME, matched
from linvit.deploy.facts import BACKBONE, DETECTIONS, Facts
from linvit.deploy.formats import FORMATS, opened, session_of
from linvit.deploy.graph import OnPixels, exported, pooled
from linvit.deploy.runtimes import PACKAGE
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import SEGMENTORS, build_dense
from linvit.models.dense.inputs import pasted
from linvit.runs.exporting import Detected
from linvit.runs.run import Run
from linvit.runs.stored import run_of_file
from linvit.runs.tasks import RUNS

NAMES = ["cat", "dog", "hare"]
SIZES = [(64, 64), (90, 120), (310, 200)]  # photos, scaled to fit 96 and 64 px
NARROW = SIZES[-1]  # scaled to 96×62 px, less than a .pt2 file reads
ANY_SIZE = [(framework, suffix) for framework in SEGMENTORS for suffix in (".onnx", ".xml", ".pt2")]
ANY_SIZE += [("retinanet", ".onnx"), ("retinanet", ".xml")]  # .pt2 from 128 px only
REGION_DETECTORS = ("mask_rcnn", "cascade_mask_rcnn")
ONE_SIZE = [("retinanet", ".pt2"), ("retinanet", ".pte"), ("semantic_fpn", ".pte")]


def run_of(framework: str, backbone: str = "resnet10t") -> Run:
    """A run that has learned nothing, and whose scores differ."""
    torch.manual_seed(0)
    kind = "segmentation" if framework in SEGMENTORS else "detection"
    model = {"framework": framework, "backbone": backbone, "heads": {"width": 8}}
    run = RUNS[kind]
    task = run.create_task(run.create_network(model, len(NAMES), 3), len(NAMES))
    head = task.network.head if hasattr(task.network, "head") else None
    if framework == "retinanet":
        torch.nn.init.normal_(head.classification_head.cls_logits.weight, std=3)
        torch.nn.init.constant_(head.classification_head.cls_logits.bias, -2)
        torch.nn.init.normal_(head.regression_head.bbox_reg.weight, std=1e-3)
    elif framework in REGION_DETECTORS:
        spread(task.network)
    elif kind == "segmentation":
        torch.nn.init.normal_(head.classifier[1].weight)
    preprocessing = DensePreprocessing(96, 64, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    stored = {"labels": [2, 5, 7]} if kind == "segmentation" else {"category_ids": [3, 1, 9]}
    return run(task, NAMES, preprocessing, None, f"{framework} on {backbone}", stored=stored)


def spread(network: nn.Module) -> None:
    """Gives a Mask R-CNN weights with which its scores and boxes differ from region to region."""
    layers = {network.rpn.head.cls_logits: 1, network.rpn.head.bbox_pred: 0.05}
    for head in network.roi_heads.box_heads:
        layers |= {head.classifier: 0.3, head.boxes: 0.02}
    for layer, std in layers.items():
        nn.init.normal_(layer.weight, std=std)


def photos(sizes=SIZES) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8) for i, size in enumerate(sizes)]


def check_same(run: Run, loaded: Run, sizes=SIZES) -> None:
    assert (loaded.name, loaded.class_names, loaded.stored) == (run.name, run.class_names, run.stored)
    assert loaded.preprocessing == run.preprocessing
    for got, expected in zip(loaded.predict(photos(sizes)), run.predict(photos(sizes)), strict=True):
        if run.task_name == "segmentation":
            assert (got.labels != expected.labels).float().mean() < 1e-3  # two classes may be as likely
            assert len(expected.labels.unique()) > 1
            continue
        assert got.scores == pytest.approx(expected.scores, abs=1e-5)
        gaps = -torch.tensor([2.0, *expected.scores, -1.0], dtype=torch.float64).diff()
        clear = (gaps[1:] > 1e-5) & (gaps[:-1] > 1e-5)  # objects with the same score may change places
        assert clear.sum() > 50
        assert torch.equal(torch.tensor(got.labels)[clear], torch.tensor(expected.labels)[clear])
        torch.testing.assert_close(got.boxes[clear], expected.boxes[clear], atol=1e-2, rtol=0)
        if expected.masks is not None:
            pairs = zip(*(pixels(row)[clear] for row in (got, expected)), strict=True)
            assert all((mask != other).sum() <= 1 for mask, other in pairs)  # a probability may be 0.5


def pixels(row) -> torch.Tensor:
    return torch.stack([torch.from_numpy(to_mask(runs, row.size)).bool() for runs in row.masks])


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (7, 13), (2, 40)])
@pytest.mark.parametrize("cells", [(1, 1), (2, 2), (3, 6), (6, 6)])
def test_pooling_by_products_is_adaptive_pooling(size, cells):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(pooled(x, cells), adaptive_avg_pool2d(x, cells))


def test_a_file_of_a_segmentor_gives_the_label_maps_of_its_run(tmp_path):
    run = run_of("semantic_fpn")
    exported = run.export(tmp_path / "maps.pt2", size=(64, 96), dynamic=False)
    assert exported.difference < 1e-5 * exported.largest
    assert (exported.facts.strides, exported.facts.fit) == ((1,), (96, 64))
    loaded = linvit.load_run(exported.path)
    check_same(run, loaded, [(64, 96), (128, 192)])
    with pytest.raises(ValueError, match=r"64×64 px, but .*maps.pt2 reads 3 and 64×96 px"):
        loaded.predict(photos([(64, 64)]))


def _in_memory(monkeypatch, network, facts: Facts) -> Run:
    """The run of a file whose session is the network itself."""
    session = OnPixels(network, facts.mean, facts.std)
    monkeypatch.setattr("linvit.runs.stored.opened", lambda path: (facts, session))
    return run_of_file(Path("file.onnx"))


@pytest.fixture
def facts():
    run = run_of("retinanet")
    about = run.preprocessing
    named = {"name": run.name, "task": "detection", "class_names": tuple(NAMES), "weights": "", "stored": run.stored}
    strides, fit = (8, 16, 32, 64, 128), (96, 64)
    seen = {"size": (64, 64), "smallest": 32, "mean": about.mean, "std": about.std, "strides": strides, "fit": fit}
    return Facts(**named, **seen, interpolation="bilinear", crop_pct=1.0, outputs=("boxes", "scores"))


def test_the_detections_of_a_file_are_those_of_its_run(monkeypatch, facts):
    run = run_of("retinanet")
    check_same(run, _in_memory(monkeypatch, Detected(run.network), facts))
    thin = (30, 300)  # scaled to 10 px, which both fill up to 32
    found = _in_memory(monkeypatch, Detected(run.network), facts).predict(photos([thin]))[0]
    assert found.size == thin
    assert found.boxes[:, 3].max() <= 30.01


@pytest.mark.parametrize("framework", REGION_DETECTORS)
def test_detections_of_one_image_are_those_of_the_network(framework, monkeypatch, facts):
    run = run_of(framework)
    about = replace(facts, name=run.name, smallest=0, size=(64, 90), outputs=DETECTIONS, strides=())
    check_same(run, _in_memory(monkeypatch, Detected(run.network), about), [(64, 90)])
    monkeypatch.setattr("torch.compiler.is_exporting", lambda: True)
    check_same(run, _in_memory(monkeypatch, Detected(run.network), about), [(64, 90)])


@pytest.mark.parametrize("exporting", [False, True])
@pytest.mark.parametrize("framework", REGION_DETECTORS)
def test_detections_in_float64(framework, exporting, monkeypatch):
    network = run_of(framework).network.double().eval()
    image = torch.rand(3, 70, 90, dtype=torch.float64)
    with torch.no_grad():
        expected = network([image])[0]
        monkeypatch.setattr("torch.compiler.is_exporting", lambda: exporting)
        boxes, scores, labels, masks = network.detections(image[None])
    assert len(labels) == 100
    assert torch.equal(labels, expected["labels"])
    for got, wanted in ((boxes, expected["boxes"]), (scores, expected["scores"])):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    assert torch.equal(pasted(masks, boxes, 70, 90), expected["masks"])


def stand_in(monkeypatch, run: Run, change) -> None:
    """Replaces ONNX files by ones that return what `change` makes of the detections of the run's network."""
    network = OnPixels(Detected(run.network.eval()), run.preprocessing.mean, run.preprocessing.std)

    def session(images):
        with torch.no_grad():
            return tuple(change(*network(images)))

    def write(program, facts, path, *names):
        path.write_bytes(b"")

    wrong = replace(FORMATS[".onnx"], packages=(), write=write, open=lambda *given: ("", session))
    monkeypatch.setitem(FORMATS, ".onnx", wrong)


CHANGES = [
    lambda boxes, scores, labels, masks: (boxes + 0.5, scores, labels, masks),
    lambda boxes, scores, labels, masks: (boxes, scores * 0.999, labels, masks),
    lambda boxes, scores, labels, masks: (boxes, scores, labels + (scores > 0.9), masks),
    lambda boxes, scores, labels, masks: (boxes, scores, labels, masks.mT),
    lambda boxes, scores, labels, masks: (boxes, scores * torch.nan, labels, masks),
    lambda boxes, scores, labels, masks: (boxes.fill_(torch.inf), scores, labels, masks),
    lambda *detections: (values[:-3] for values in detections),
    lambda *detections: (values[:0] for values in detections),
    lambda *detections: (torch.cat((values, values[:3])) for values in detections),
]


@pytest.fixture
def detections():
    corner, scores = 300 * torch.rand(100, 2), torch.linspace(0.05, 1, 100)
    boxes = torch.cat((corner, corner + 20), dim=1)
    return boxes, scores, torch.arange(100) % 7, torch.rand(100, 28, 28)


@pytest.mark.parametrize("change", CHANGES)
def test_other_detections_are_no_match(change, detections):
    other = tuple(change(*(values.clone() for values in detections)))
    assert matched([(detections, other)], 1e-4)[2] < LEAST_SAME
    assert matched([(other, detections)], 1e-4)[2] < LEAST_SAME


def test_detections_that_differ_by_rounding_match_in_any_order(detections):
    order = torch.randperm(100)
    noise = (1e-3, 1e-5, 0, 1e-4)
    other = tuple((values + by)[order] for values, by in zip(detections, noise, strict=True))
    none = tuple(values[:0] for values in detections)
    expected, outputs, share = matched([(detections, other), (none, none)], 1e-4)
    assert share == 1
    for values, ours, theirs, by in zip(detections, expected, outputs, noise, strict=True):
        assert torch.equal(ours, values)
        torch.testing.assert_close(theirs, values + by)
    assert matched([(detections, tuple(values[1:] for values in other))], 1e-4)[2] == 0.99


def test_a_file_with_other_detections_is_not_kept(tmp_path, monkeypatch):
    run = run_of("mask_rcnn")
    stand_in(monkeypatch, run, CHANGES[0])
    with pytest.raises(ValueError, match=r"Of the detections, [\d.]+% are the same in the ONNX file and the network"):
        run.export(tmp_path / "file.onnx", images=photos([(64, 64)]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_needs_detections(tmp_path, monkeypatch):
    run = run_of("mask_rcnn")
    run.network.roi_heads.score_thresh = 1.0
    stand_in(monkeypatch, run, lambda *detections: (values[:0] for values in detections))
    with pytest.raises(ValueError, match="The network detects nothing in the images that the file is compared on"):
        run.export(tmp_path / "file.onnx", images=photos([(64, 64)]))
    assert not list(tmp_path.iterdir())


def check_region_detector(run: Run, path: Path) -> None:
    """Exports a run, and compares its predictions with those of the file."""
    sizes = [(64, 96), (128, 192)]
    exported = run.export(path, size=(64, 96), images=photos([(64, 96)]))
    assert exported.same == 1
    assert exported.difference < 1e-4 * exported.largest  # of masks, which are the least exact
    loaded = linvit.load_run(path)
    check_same(run, loaded, sizes)
    with pytest.raises(ValueError, match=r"64×64 px, but .*file.\w+ reads 3 and 64×96 px"):
        loaded.predict(photos([(64, 64)]))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("framework", REGION_DETECTORS)
def test_files_of_region_detectors(framework, suffix, tmp_path):
    check_region_detector(run_of(framework, "mavit_nano"), tmp_path / f"file{suffix}")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_file_can_detect_nothing(suffix, tmp_path):
    run = run_of("mask_rcnn")
    run.network.roi_heads.score_thresh = 1.0
    about, black = run.preprocessing, torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    program = exported(OnPixels(Detected(run.network).eval(), about.mean, about.std), black)
    session = session_of(FORMATS[suffix], program, tmp_path / f"file{suffix}", outputs=DETECTIONS)
    shapes = [tuple(values.shape) for values in session(black)]
    assert shapes == [(0, 4), (0,), (0,), (0, 28, 28)]


@pytest.mark.parametrize("change", [{"task": "speech"}, {"fit": None}, {"task": "classification"}])
def test_facts_that_contradict_each_other_are_one_sentence(monkeypatch, facts, change):
    with pytest.raises(ValueError, match=r"What file.onnx says about its task '\w+' is damaged: export it again"):
        _in_memory(monkeypatch, torch.nn.Identity(), replace(facts, **change))


@pytest.mark.slow
def test_a_backbone_has_an_output_for_each_map(tmp_path):
    network = timm.create_model("resnet10t", features_only=True, out_indices=(1, 2, 4)).eval()
    exported = linvit.export(network, tmp_path / "maps.onnx", size=64)
    facts, session = opened(exported.path)
    assert (facts.task, facts.outputs, facts.strides) == (BACKBONE, ("stride4", "stride8", "stride32"), (4, 8, 32))
    images = torch.randint(0, 256, (2, 3, 45, 70), dtype=torch.uint8)
    with torch.no_grad():
        expected = OnPixels(network, facts.mean, facts.std)(images)
    for got, wanted in zip(session(images), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"maps.onnx is the backbone resnet10t, which has maps and predicts nothing"):
        linvit.load_run(exported.path)


def test_one_wrong_map_among_many_is_not_kept(tmp_path, monkeypatch):
    open_file = FORMATS[".pt2"].open

    def wrong(*given):
        text, session = open_file(*given)
        return text, lambda images: (*session(images)[:-1], 1.01 * session(images)[-1])

    monkeypatch.setitem(FORMATS, ".pt2", replace(FORMATS[".pt2"], open=wrong))
    network = timm.create_model("resnet10t", features_only=True).eval()
    with pytest.raises(ValueError, match="so it is not kept"):
        linvit.export(network, tmp_path / "maps.pt2", size=64, dynamic=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "suffix", "options", "message"),
    [
        (partial(run_of, "mask_rcnn"), ".pt2", {}, "mask_rcnn on resnet10t cannot be exported to .pt2, expected .onnx"),
        (partial(run_of, "mask_rcnn"), ".onnx", {"dynamic": True}, "reads one image of one size in float32"),
        (partial(run_of, "mask_rcnn"), ".onnx", {"int8": True, "calibrate": ["x"]}, "one image of one size in float32"),
        (partial(build_dense, "upernet", "resnet10t", 3), ".pt2", {}, "`source` is of type UperNet, expected a run, a"),
        (torch.nn.ReLU, ".pt2", {}, "`source` is of type ReLU, expected a run"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(tmp_path, source, suffix, options, message):
    with pytest.raises(ValueError, match=message):
        linvit.export(source(), tmp_path / f"x{suffix}", **options)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "suffix"), ANY_SIZE)
def test_files_of_any_size(framework, suffix, tmp_path):
    run = run_of(framework, "mavit_nano")
    loaded = linvit.load_run(run.export(tmp_path / f"file{suffix}").path)
    if suffix != ".pt2":
        check_same(run, loaded)
        return
    check_same(run, loaded, SIZES[:-1])
    with pytest.raises(ValueError, match=r"96×62 px, but .*file.pt2 reads 3 and sides of at least 64 px"):
        loaded.predict(photos([NARROW]))


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "suffix"), ONE_SIZE)
def test_files_of_one_size(framework, suffix, tmp_path):
    run = run_of(framework, "mavit_nano")
    path = run.export(tmp_path / f"file{suffix}", size=(64, 96), dynamic=False).path
    check_same(run, linvit.load_run(path), [(64, 96), (128, 192)])


@pytest.mark.slow
@pytest.mark.parametrize("framework", [*SEGMENTORS, "retinanet"])
def test_core_ml_files_of_one_size(framework, tmp_path, on_macos):
    on_macos()
    run = run_of(framework, "mavit_nano")
    exported = run.export(tmp_path / f"file{PACKAGE}", size=(64, 96))
    assert exported.difference < 1e-2 * exported.largest  # float16
    assert linvit.load_run(exported.path).class_names == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano", "deit_tiny_mala", "swin_tiny_rala", "convnext_atto"])
@pytest.mark.parametrize("suffix", list(FORMATS))
def test_every_backbone_in_every_format(name, suffix, tmp_path, on_macos):
    if suffix == PACKAGE:
        on_macos()
    torch.manual_seed(0)
    network = timm.create_model(name, features_only=True).eval()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):  # as small as they begin, the eps of norms counts, which float16 rounds by 1 %
            nn.init.xavier_normal_(layer.weight)
    exported = linvit.export(network, tmp_path / f"maps{suffix}", size=224 if "tiny" in name else 64, dynamic=False)
    assert exported.difference < (1e-2 if suffix == PACKAGE else 1e-5) * exported.largest  # Core ML: float16


@pytest.mark.slow
def test_a_dense_backbone_is_one(tmp_path):
    exported = linvit.export(DenseBackbone("mavit_nano"), tmp_path / "maps.onnx", size=64)
    assert exported.facts.outputs == ("stride4", "stride8", "stride16", "stride32")
    assert exported.facts.name == "mavit_nano"

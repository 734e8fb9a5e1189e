import json
import re
from pathlib import Path

import pytest
import torch
from dense_answers import IDS, SIDE, knows_maps, knows_objects, write_scenes, write_untrained
from PIL import Image
from tiny_dense import write_dense_recipe
from tiny_run import ONE_STEP

from linvit.data.dense.label_maps import read_map
from linvit.models.dense.frameworks import build_dense
from linvit.runs import dense, load_run, train
from linvit.runs.predictions import untaken_name
from linvit.runs.tasks.segmentation import label_map
from linvit.tasks.detection import average_precision
from linvit_cli import main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def detector(tmp_path_factory, scenes):
    return write_untrained(tmp_path_factory.mktemp("weights") / "detector.ckpt", "retinanet", scenes)


@pytest.fixture(scope="module")
def segmentor(tmp_path_factory, scenes):
    return write_untrained(tmp_path_factory.mktemp("weights") / "segmentor.ckpt", "semantic_fpn", scenes)


@pytest.fixture
def photos(tmp_path):
    """Two files of one name, a thin one, one that is not an image."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    noise = Image.effect_noise((37, 50), 60).convert("RGB")
    noise.save(tmp_path / "photos" / "A.png")
    noise.resize((130, 51)).save(tmp_path / "photos" / "more" / "a.jpg")
    noise.resize((500, 3)).save(tmp_path / "photos" / "thin [1].png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"broken")
    return tmp_path / "photos"


def test_the_truth_written_as_detections_scores_one(scenes, tmp_path):
    folder = scenes / "detection" / "images" / "val"
    predictions = knows_objects(scenes).predict(folder, output=tmp_path / "out")
    assert predictions.unreadable == ()
    assert all(row.masks is None for row in predictions), "what is written is not kept"
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    truth = json.loads((scenes / "detection" / "annotations" / "instances_val.json").read_text())
    ids = [image["id"] for image in truth["images"]]
    for kind in ("bbox", "segm"):
        rows = [
            {key: row[key] for key in row if key not in ("id", "area", "iscrowd")} for row in written["annotations"]
        ]
        assert average_precision(truth, rows, ids, kind)["ap"] == 1.0
    assert [image["file_name"] for image in written["images"]] == [row.file for row in predictions]
    assert {(image["height"], image["width"]) for image in written["images"]} == {(SIDE, SIDE)}
    assert written["categories"] == [{"id": IDS * (digit + 1), "name": str(digit)} for digit in range(10)]
    areas = {tuple(entry["bbox"]): entry["area"] for entry in truth["annotations"]}
    assert all(row["area"] == areas[tuple(row["bbox"])] for row in written["annotations"])
    assert len({row["id"] for row in written["annotations"]}) == len(written["annotations"]) > 5


def test_objects_below_the_threshold_are_written_but_not_counted(scenes, tmp_path):
    folder = scenes / "detection" / "images" / "val"
    counts = []
    for threshold in (None, 0.9):
        options = {} if threshold is None else {"threshold": threshold}
        predictions = knows_objects(scenes).predict([folder], output=tmp_path / "out", **options)
        words = [row["objects"] for row in predictions.table()]
        counts.append(sum(int(count) for word in words for count in re.findall(r"(\d+) ×", word)))
    assert counts[0] == len(json.loads((tmp_path / "out" / "predictions.json").read_text())["annotations"])
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize("network", ["objects", "maps"])
def test_what_is_saved_later_is_what_is_written_at_once(scenes, tmp_path, network):
    run = knows_objects(scenes) if network == "objects" else knows_maps(scenes)
    kind, split = ("detection", "val") if network == "objects" else ("segmentation", "validation")
    folder = scenes / kind / "images" / split
    written = run.predict(folder, output=tmp_path / "at_once")
    run.predict(folder).save(tmp_path / "later")
    files = {path.relative_to(tmp_path / "later") for path in (tmp_path / "later").rglob("*") if path.is_file()}
    assert len(files) == (5 if network == "objects" else 7)
    for file in files:
        assert (tmp_path / "later" / file).read_bytes() == (tmp_path / "at_once" / file).read_bytes()
    with pytest.raises(ValueError, match=r"were written to .*at_once and not kept"):
        written.save(tmp_path / "again")


def test_objects_of_an_image_in_memory(scenes, tmp_path):
    run = knows_objects(scenes)
    path = next((scenes / "detection" / "images" / "val").iterdir())
    (of_file,), (of_image,) = run.predict(path), run.predict(Image.open(path))
    assert (of_image.file, of_image.size) == ("image 1", (SIDE, SIDE))
    assert torch.equal(of_file.boxes, of_image.boxes)
    assert of_file.masks == of_image.masks
    assert of_image.scores == sorted(of_image.scores, reverse=True)
    assert of_image.classes == [run.class_names[label] for label in of_image.labels]
    run.predict([path]).to_json(tmp_path / "objects.json")
    assert len(json.loads((tmp_path / "objects.json").read_text())["annotations"]) == len(of_file.scores)
    with pytest.raises(ValueError, match="call `save` with a folder"):
        run.predict(path).to_csv(tmp_path / "objects.csv")


@pytest.mark.parametrize("first", [0, 1, 40])
def test_written_maps_are_the_truth(scenes, tmp_path, first):
    run = knows_maps(scenes, first)
    folder = scenes / "segmentation" / "images" / "validation"
    predictions = run.predict(folder, output=tmp_path / "out")
    for row, shown in zip(predictions, predictions.table(), strict=True):
        assert row.labels is None, "what is written is not kept"
        name = f"{Path(row.file).stem}.png"
        truth = read_map(scenes / "segmentation" / "annotations" / "validation" / name, range(1, 12), (0,))
        written = read_map(tmp_path / "out" / "maps" / name, range(first, first + 11))
        assert torch.equal(written[truth != 255], truth[truth != 255])
        assert (written != 255).all()
        assert shown["regions"].startswith("canvas ")
    names = json.loads((tmp_path / "out" / "labels.json").read_text())
    assert names[str(first)] == "canvas"


@pytest.mark.parametrize("kind", ["detector", "segmentor"])
def test_any_size_two_of_a_name_and_a_broken_file(kind, photos, tmp_path, request, capsys):
    checkpoint = request.getfixturevalue(kind)
    out = tmp_path / "out"
    assert main(["predict", str(checkpoint), str(photos), "--output", str(out)]) == 1
    assert "broken.png is not a readable image" in capsys.readouterr().err
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    names = {"A", "a_2", "thin [1]"}
    expected = {f"overlays/{name}.jpg" for name in names}
    if kind == "detector":
        expected |= {"predictions.json", "results.json"}
        assert json.loads((out / "results.json").read_text()) == []
        assert json.loads((out / "predictions.json").read_text())["annotations"] == []  # untrained: no score above 0.05
    else:
        expected |= {"labels.json", *(f"maps/{name}.png" for name in names)}
        assert [Image.open(out / "maps" / f"{name}.png").size for name in sorted(names)] == [
            (37, 50),
            (130, 51),
            (500, 3),
        ]
    assert files == expected
    assert main(["predict", str(checkpoint), str(photos / "thin [1].png")]) == 0
    shown = capsys.readouterr().out
    assert "thin [1].png" in shown
    assert ("nothing with a score of 50 % or more" in shown) == (kind == "detector")


def test_overlays_of_an_earlier_call_are_not_looked_at(segmentor, photos):
    (photos / "broken.png").unlink()
    for _ in range(2):
        assert main(["predict", str(segmentor), str(photos), "--output", str(photos / "out")]) == 0
    assert len(list((photos / "out" / "overlays").iterdir())) == 3


def test_labels_chosen_piece_by_piece_are_those_of_all_logits(monkeypatch):
    logits = torch.randn(1, 11, 24, 40)
    whole = torch.nn.functional.interpolate(logits, (33, 57), mode="bilinear", align_corners=False).argmax(1)[0]
    monkeypatch.setattr(dense, "AT_ONCE", 3 * 33 * 57)
    filled = torch.nn.functional.pad(logits, (0, 0, 0, 8), value=100.0)  # the image is filled up to 32 rows
    labels = label_map(lambda images: filled, torch.zeros(3, 24, 40), (33, 57))
    assert torch.equal(labels.long(), whole)


def test_names_differ_on_every_file_system():
    taken = set()
    paths = ("a/x.jpg", "b/X.png", "x_2.jpg", "x_2_2.png", "y.png")
    names = [untaken_name(path, taken) for path in paths]
    assert names[0] == "x"
    assert len({name.lower() for name in names}) == len(paths)


def test_category_ids_travel_from_the_training_file_to_predictions(scenes, tmp_path):
    groups = {"task": {"ema_decay": 0.9}, "data": {"batch_size": 1}, "trainer": ONE_STEP | {"limit_val_batches": 0}}
    run = train(write_dense_recipe(tmp_path, scenes, "mask_rcnn", **groups))
    assert run.stored["category_ids"] == [IDS * (digit + 1) for digit in range(10)]
    assert list(run.task.networks()) == ["raw", "ema"]
    folder = scenes / "detection" / "images" / "val"
    assert len(run.predict(folder, threshold=0.0, weights="raw", output=tmp_path / "out")) == 3
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {row["category_id"] % IDS for row in written["annotations"]} <= {0}
    path = scenes / "detection" / "annotations" / "instances_val.json"
    truth = {image["file_name"]: image["id"] for image in json.loads(path.read_text())["images"]}
    assert {Path(image["file_name"]).name: image["id"] for image in written["images"]} == truth
    judge = pytest.importorskip("pycocotools.coco").COCO(str(path))
    results = judge.loadRes(str(tmp_path / "out" / "results.json"))
    assert len(results.anns) == len(written["annotations"]) > 0
    Image.new("RGB", (64, 64)).save(tmp_path / "other.png")
    run.predict([tmp_path / "other.png", folder], output=tmp_path / "out")
    ids = [image["id"] for image in json.loads((tmp_path / "out" / "predictions.json").read_text())["images"]]
    assert len(set(ids)) == len(ids) == 4
    assert ids[0] not in truth.values()


def test_an_image_that_does_not_fit_into_memory_is_left_out(segmentor, photos, monkeypatch):
    monkeypatch.setattr(dense, "memory", lambda: 2000 * dense.PIXEL_BYTES)
    predictions = load_run(segmentor).predict(photos)
    assert [Path(row.file).name for row in predictions] == ["A.png", "thin [1].png"]
    assert any("51×130 px" in sentence and "make the image smaller" in sentence for sentence in predictions.unreadable)


@pytest.mark.parametrize(
    ("framework", "classes", "sides"), [("semantic_fpn", 150, (2048, 512)), ("retinanet", 80, (1333, 800))]
)
def test_released_networks_know_their_classes_and_sizes(framework, classes, sides, tmp_path):
    weights = build_dense(framework, "ravlt_nano", classes).state_dict()
    torch.save({"state_dict": weights, "meta": {}}, tmp_path / "released.pth")
    run = load_run(model="ravlt_nano", checkpoint=tmp_path / "released.pth", framework=framework)
    assert all(torch.equal(value, weights[key]) for key, value in run.network.state_dict().items())
    assert (run.preprocessing.long_side, run.preprocessing.short_side) == sides
    named = dict(zip(run.stored.get("category_ids", range(1, 151)), run.class_names, strict=True))
    assert len(named) == classes
    expected = ("person", "stop sign", "toothbrush") if framework == "retinanet" else ("1", "13", "90")
    assert (named[1], named[13], named[90]) == expected

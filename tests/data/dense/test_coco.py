import copy
import json

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image
from pycocotools import coco as judge_files
from pycocotools import cocoeval as judge

from linvit.data.dense.coco import Coco
from linvit.data.dense.objects import to_original, to_results
from linvit.data.dense.scenes import make_scenes

SIZE = 96


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "new"
    list(make_scenes(folder, 8, 6, SIZE, 0))
    return folder / "detection"


def source(root, **options):
    settings = {"long_side": SIZE, "short_side": SIZE, "num_workers": 0, "batch_size": 2, "flip": 0.0}
    return Coco(str(root), **settings | options)


def small_set(root, sizes=((20, 30), (30, 20)), annotations=None):
    """Plain images in COCO's own layout, one square object each unless others are given."""
    images = []
    for part in ("train2017", "val2017"):
        (root / part).mkdir(exist_ok=True)
        for number, (height, width) in enumerate(sizes, start=1):
            Image.fromarray(np.full((height, width, 3), 20 * number, np.uint8)).save(root / part / f"{number}.png")
    images = [
        {"id": number, "file_name": f"{number}.png", "height": height, "width": width}
        for number, (height, width) in enumerate(sizes, start=1)
    ]
    square = {"bbox": [2, 3, 6, 6], "segmentation": [[2, 3, 8, 3, 8, 9, 2, 9]], "area": 36, "iscrowd": 0}
    if annotations is None:
        annotations = [{"id": image["id"], "image_id": image["id"], "category_id": 7} for image in images]
    content = {
        "images": images,
        "annotations": [square | entry for entry in annotations],
        "categories": [{"id": 7, "name": "cat"}, {"id": 70, "name": "dog"}],
    }
    (root / "annotations").mkdir(exist_ok=True)
    for part in ("train2017", "val2017"):
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    return root


def test_batches_are_lists_of_images_and_targets(scenes):
    images, targets = next(iter(source(scenes, batch_size=3).train_dataloader()))
    assert [image.shape for image in images] == [(3, SIZE, SIZE)] * 3
    assert images[0].dtype == torch.float32
    for target in targets:
        count = len(target["labels"])
        assert (target["boxes"].shape, target["boxes"].dtype) == ((count, 4), torch.float32)
        assert (target["masks"].shape, target["masks"].dtype) == ((count, SIZE, SIZE), torch.uint8)
        assert target["labels"].dtype == torch.int64
        assert 0 <= target["labels"].min() <= target["labels"].max() < 10
        assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()


def test_images_of_different_sizes_are_validated_apart(tmp_path):
    data = source(small_set(tmp_path, ((20, 30), (30, 20), (20, 30), (20, 30), (20, 20))), val_batch_size=2)
    sizes = [[target["original_size"] for target in targets] for _, targets in data.val_dataloader()]
    assert sizes == [[(20, 20)], [(20, 30), (20, 30)], [(20, 30)], [(30, 20)]]


def test_training_repeats_exactly_goes_on_and_does_not_mind_workers(scenes):
    def drawn(epoch=0, reached=(0, 0), **options):
        loader = source(
            scenes, resizing="detr", short_sides=(64, 96), crop_short_sides=(80,), crop_range=(40, 70), **options
        ).train_dataloader()
        loader.sampler.set_epoch(epoch)
        loader.reached = reached
        return [
            (target["image_id"], image.sum().item())
            for images, targets in loader
            for image, target in zip(images, targets, strict=True)
        ]

    whole = drawn(epoch=1)
    assert sorted(number for number, _ in whole) == list(range(1, 9))
    assert drawn(epoch=1) == whole
    assert drawn(epoch=1, reached=(1, 2)) == whole[4:]
    assert drawn(epoch=1, num_workers=2) == whole
    assert drawn(epoch=2) != whole


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_image_is_evaluated_once_by_some_process(scenes, ranks, world):
    seen = []
    for _ in ranks(world):
        seen += [target["image_id"] for _, targets in source(scenes).val_dataloader() for target in targets]
    assert sorted(seen) == list(range(1, 7))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("tool", ["faster", "pycocotools"])
def test_ground_truth_as_detections_scores_one(scenes, scale, tool):
    data = source(scenes, long_side=scale * SIZE, short_side=scale * SIZE)
    results = []
    for images, targets in data.val_dataloader():
        for image, target in zip(images, targets, strict=True):
            objects = target["iscrowd"] == 0
            found = {key: target[key][objects] for key in ("boxes", "labels", "masks")}
            found["scores"] = torch.ones(int(objects.sum()))
            found = to_original(found, image.shape[-2:], target["original_size"])
            results += to_results(target["image_id"], found, data.annotations("val").category_ids)
    coco, evaluation = {"faster": (COCO, COCOeval_faster), "pycocotools": (judge_files.COCO, judge.COCOeval)}[tool]
    truth = coco()
    truth.dataset = data.annotations("val").ground_truth()
    truth.createIndex()
    for kind in ("bbox", "segm"):
        scored = evaluation(truth, truth.loadRes(copy.deepcopy(results)), kind)
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
        assert scored.stats[0] == pytest.approx(1.0, abs=1e-12)


def test_predictions_go_back_to_the_size_of_the_file():
    masks = torch.zeros(1, 1, 40, 60)
    masks[..., 10:20, 30:60] = 0.8
    prediction = {
        "boxes": torch.tensor([[30.0, 10, 60, 20]]),
        "labels": torch.tensor([1]),
        "scores": torch.tensor([0.5]),
        "masks": masks,
    }
    moved = to_original(prediction, (40, 60), (20, 30))
    assert moved["boxes"].tolist() == [[15, 5, 30, 10]]
    expected = torch.zeros(1, 20, 30, dtype=torch.bool)
    expected[0, 5:10, 15:] = True
    assert torch.equal(moved["masks"], expected)
    (entry,) = to_results(9, moved, [13, 90])
    assert (entry["image_id"], entry["category_id"], entry["bbox"], entry["score"]) == (9, 90, [15, 5, 15, 5], 0.5)
    assert entry["segmentation"]["size"] == [20, 30]


def test_crowds_are_evaluated_and_not_trained_on(tmp_path):
    entries = [
        {"id": 1, "image_id": 1, "category_id": 7},
        {
            "id": 2,
            "image_id": 1,
            "category_id": 70,
            "iscrowd": 1,
            "segmentation": {"size": [20, 30], "counts": [5, 9, 586]},
        },
        {"id": 3, "image_id": 2, "category_id": 70},
    ]
    data = source(small_set(tmp_path, annotations=entries), long_side=64, short_side=32)
    trained = {
        target["image_id"]: target["labels"].tolist() for _, targets in data.train_dataloader() for target in targets
    }
    assert trained == {1: [0], 2: [1]}
    judged = {
        target["image_id"]: target["iscrowd"].tolist() for _, targets in data.val_dataloader() for target in targets
    }
    assert judged == {1: [0, 1], 2: [0]}


def test_images_without_objects_are_evaluated_and_trained_on_only_if_asked(tmp_path, caplog):
    entries = [
        {"id": 1, "image_id": 2, "category_id": 7},
        {"id": 2, "image_id": 3, "category_id": 7, "iscrowd": 1},
    ]
    root = small_set(tmp_path, ((40, 40),) * 3, entries)
    caplog.set_level("INFO", "linvit")
    assert len(source(root).train_set()) == 1
    assert "2 images without objects are not used for training" in caplog.text
    data = source(root, keeps_empty=True, batch_size=3)
    assert len(data.train_set()) == 3
    _, targets = next(iter(data.train_dataloader()))
    assert sorted(len(target["boxes"]) for target in targets) == [0, 0, 1]
    assert len(data.val_set()) == 3


def test_wide_and_tall_images_come_in_different_batches(tmp_path):
    root = small_set(tmp_path, ((20, 30), (30, 20)) * 4)
    shapes = [{image.shape[1] < image.shape[2] for image in images} for images, _ in source(root).train_dataloader()]
    assert len(shapes) == 4
    assert all(len(kinds) == 1 for kinds in shapes)


@pytest.mark.parametrize("damage", ["broken", "other"])
def test_an_image_that_cannot_be_used_is_named_and_left_out_up_to_the_limit(tmp_path, caplog, damage):
    root = small_set(tmp_path)
    path = root / "val2017" / "2.png"
    says = r"val2017/2\.png is not a readable image"
    if damage == "broken":
        path.write_bytes(b"broken")
    else:
        Image.new("RGB", (50, 60)).save(path)
        says = r"val2017/2\.png has 60×50 px, but \S+instances_val2017\.json says that it has 30×20 px"
    with pytest.raises(ValueError, match=says):
        list(source(root).val_dataloader())
    batches = list(source(root, max_corrupt=1).val_dataloader())
    assert [target["image_id"] for _, targets in batches for target in targets] == [1]
    assert "Left out (1 of at most 1)" in caplog.text


@pytest.mark.parametrize("layout", ["roboflow", "cvat", "label studio", "named"])
def test_other_programs_write_other_layouts(tmp_path, layout):
    root = small_set(tmp_path)
    notes = {part: root / "annotations" / f"instances_{part}2017.json" for part in ("train", "val")}
    settings = {"name": "coco", "root": str(root)}
    if layout == "roboflow":
        (root / "val2017").rename(root / "valid")
        (root / "train2017").rename(root / "train")
        for part, folder in (("train", "train"), ("val", "valid")):
            notes[part].rename(root / folder / "_annotations.coco.json")
    elif layout == "cvat":
        (root / "train2017").rename(root / "images")
        notes["train"].rename(root / "annotations/instances_default.json")
        settings |= {"train": "annotations/instances_default.json", "train_images": "images"}
    elif layout == "label studio":
        (root / "train2017").rename(root / "images")
        notes["train"].rename(root / "result.json")
        content = json.loads((root / "result.json").read_text())
        for image in content["images"]:
            image["file_name"] = f"images/{image['file_name']}"
        (root / "result.json").write_text(json.dumps(content))
        settings |= {"train": "result.json", "train_images": "."}
    assert Coco.found_in(root) == settings
    options = {key: value for key, value in settings.items() if key not in ("name", "root")}
    if layout == "named":
        (root / "val2017").rename(tmp_path / "elsewhere")
        notes["val"].rename(root / "held out.json")
        options = {"val": "held out.json", "val_images": str(tmp_path / "elsewhere")}
    data = source(root, **options)
    for items in (data.train_set(), data.val_set()):
        assert [type(items[index]) for index in range(len(items))] == [tuple, tuple]


def test_missing_folders_are_named(tmp_path):
    root = small_set(tmp_path)
    for path in (root / "val2017").iterdir():
        path.unlink()
    (root / "val2017").rmdir()
    with pytest.raises(ValueError, match="has no val images: expected one of the folders val2017, images/val2017"):
        source(root).val_dataloader()

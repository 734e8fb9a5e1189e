import re

import pytest
from dense_answers import IDS, knows_maps, knows_objects, write_scenes

from linvit.data.dense import Coco
from linvit.tasks.detection import average_precision, average_precision_by_class


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def page_of(run, path):
    run.path = path / "checkpoints" / "best.ckpt"
    (path / "metrics.csv").write_text("epoch,train_loss,lr,box_ap,miou\n1,2.0,0.1,,\n2,1.0,0.1,0.5,0.4\n")
    measures = run.evaluate(trainer={"accelerator": "cpu", "devices": 1})
    assert run.report(measures=measures) == path / "report.html"
    page = (path / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page), "nothing is read from elsewhere"
    return re.findall(r"<h2>(.*?)</h2>", page), re.sub(r"data:image[^\"]*", "", page)


def test_page_of_a_detector_that_is_always_right(scenes, tmp_path):
    headings, page = page_of(knows_objects(scenes), tmp_path)
    per_class = [f"Average precision of {shape} per class" for shape in ("boxes", "masks")]
    assert headings == ["Measures", "Training", *per_class, "Images"]
    assert page.count("ground truth and prediction") == 3
    rows = re.findall(r"<tr><td>\d</td><td>([\d.]+) %</td><td>([\d.]+) %</td><td>(\d+)</td></tr>", page)
    assert len(rows) > 8
    assert {row[:2] for row in rows} == {("100.00", "100.00")}
    truth = Coco(str(scenes / "detection")).ground_truth()
    single = sum(not entry["iscrowd"] for entry in truth["annotations"])
    assert sum(int(row[2]) for row in rows) == 2 * single  # once for boxes, once for masks


def test_page_of_a_segmentor_that_is_always_right(scenes, tmp_path):
    headings, page = page_of(knows_maps(scenes), tmp_path)
    expected = ["Intersection over union per class", "Confused classes", "Images"]
    assert headings == ["Measures", "Training", *expected]
    assert '<td class="words">canvas</td><td>100.0 %</td><td>100.0 %</td>' in page
    assert "Every pixel is classified correctly." in page
    assert page.count("ground truth and prediction") == 3


def test_average_precision_of_classes_is_that_of_all():
    boxes = {1: [10, 10, 30, 30], 2: [50, 50, 20, 40], 3: [5, 60, 30, 30]}
    entries = [
        {"id": key, "image_id": 1, "category_id": IDS * key, "bbox": box, "area": 900, "iscrowd": 0}
        for key, box in boxes.items()
    ]
    categories = [{"id": IDS * key, "name": str(key)} for key in (*boxes, 4)]
    size = {"id": 1, "file_name": "a.jpg", "height": 100, "width": 100}
    truth = {"info": {}, "images": [size], "annotations": entries, "categories": categories}
    shifted = [13, 10, 30, 30]  # IoU 0.818: right up to 0.8
    rows = [
        {"image_id": 1, "category_id": IDS * key, "bbox": box, "score": 0.9}
        for key, box in ((1, shifted), (2, boxes[2]))
    ]
    by_class = average_precision_by_class(truth, rows, [1], "bbox")
    assert by_class == {IDS: (pytest.approx(0.7), 1.0, 1), 2 * IDS: (1.0, 1.0, 1), 3 * IDS: (0.0, 0.0, 1)}
    mean = sum(ap for ap, _, _ in by_class.values()) / 3
    assert average_precision(truth, rows, [1], "bbox")["ap"] == pytest.approx(mean)
    assert average_precision_by_class(truth, [], [1], "bbox") == {IDS * key: (0.0, 0.0, 1) for key in boxes}

import re

import pytest
import torch
from PIL import Image
from tiny_run import write_recipe

from linvit.cli import main
from linvit.runs.report import judge
from linvit.runs.restore import restore, source_for


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    assert main(["train", str(write_recipe(folder)), "trainer.max_epochs=1"]) == 0
    return folder / "run"


def test_report_is_one_file_with_every_section(run, capsys):
    assert main(["eval", str(run), "--json", "--report"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1, "standard output stays one JSON object"
    assert f"{run / 'report.html'} is the page" in said.err
    page = (run / "report.html").read_text()
    for heading in ("What was measured", "Training", "Accuracy of each class", "Most confused pairs", "Calibration"):
        assert f"<h2>{heading}</h2>" in page
    assert "Expected calibration error" in page
    assert len(re.findall(r"network alone.*?</td><td>[\d,.]+</td>", page)) == 1
    assert len(re.findall("<img ", page)) == 4
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page), "nothing is read from elsewhere"


def test_report_of_a_folder_with_an_unreadable_image(run, tmp_path):
    for name in ("3", "7"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(2):
            Image.linear_gradient("L").resize((40, 40)).save(tmp_path / "data" / name / f"{number}.png")
    (tmp_path / "data" / "3" / "0.png").write_bytes(b"broken")
    judged, _ = judge(
        restore(run).task.network.eval(), source_for(restore(run), str(tmp_path / "data"), 0), torch.device("cpu")
    )
    assert judged.indices.tolist() == [1, 2, 3]
    assert judged.targets.tolist() == [3, 7, 7]
    assert (judged.confidences > 0).all()
    assert (judged.confidences <= 1).all()


def test_judging_agrees_with_eval(run):
    restored = restore(run)
    judged, _ = judge(restored.task.network.eval(), source_for(restored, None), torch.device("cpu"))
    images = restored.task.network, source_for(restored, None).val_set()
    with torch.inference_mode():
        expected = images[0](images[1].images).argmax(-1)
    assert judged.predictions.equal(expected)
    assert judged.targets.equal(images[1].targets)

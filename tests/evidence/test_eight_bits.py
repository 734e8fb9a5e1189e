"""What 8 bits cost: rows from a tiny network, the table on a page, and what cannot be measured."""

import pytest
from tiny_run import write_recipe

from evidence import eight_bits
from evidence.eight_bits import BEGIN, END, FLOAT, OURS, WAYS, WRITERS, Row, to_markdown, write_bundled
from linvit.runs import load_run
from linvit.runs.training import train_folder
from linvit.studies.table import paired


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = {"name": "ravlt_nano", "depths": [1, 1, 1, 1]}
    return load_run(train_folder(write_recipe(tmp_path_factory.mktemp("run"), model=model, trainer={"max_epochs": 1})))


def test_the_difference_is_that_of_the_same_images(monkeypatch):
    before, after = [100.0] * 8 + [0.0] * 2, [100.0] * 7 + [0.0] * 3
    cells = Row("net", "ONNX", OURS, 10, 70.0, paired(after, before), 90.0).cells()
    assert cells["Δ float32, points"] == "-10.00 [-32.62, +12.62]"  # 10 ± 2.262 · 31.62 / √10
    assert Row("net", "ONNX", FLOAT, 10, 80.0, None, 100.0).cells()["Δ float32, points"] == "–"


def test_a_page_gets_the_table_of_the_networks_with_weights(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no place for the tables"):
        write_bundled("data", page)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(eight_bits, "bundled_names", list)
    with pytest.raises(ValueError, match="No network comes with weights"):
        write_bundled("data", page)
    monkeypatch.setattr(eight_bits, "bundled_names", lambda: ["net"])
    monkeypatch.setattr(eight_bits, "load_run", lambda model: model)

    def measured(runs, progress, **data):
        assert (runs, data) == ({"net": "net"}, {"data": "cifar", "root": "folder"})
        return [Row("net", "ONNX", way, 10_000, 80.0, None, 100.0) for way in WAYS]

    monkeypatch.setattr(eight_bits, "eight_bits", measured)
    write_bundled("folder", page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n| network | runtime | file |")
    assert "| net | ONNX | every step | 80.00 | – | 100.00 |\n" in text
    assert "*10,000 images; Δ" in text
    assert "old" not in text


def test_data_without_images_to_calibrate_on_is_refused(run):
    with pytest.raises(ValueError, match="The data is Digits, expected images of classes in a folder, or of CIFAR"):
        eight_bits.eight_bits({"net": run})


@pytest.mark.slow
def test_every_way_in_every_runtime(run, tmp_path):
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, target) in enumerate(zip(digits.images[:200], digits.target, strict=False)):
        from PIL import Image

        folder = tmp_path / str(target)
        folder.mkdir(exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).resize((32, 32)).save(folder / f"{number}.png")
    said = []
    rows = eight_bits.eight_bits({"net": run}, said.append, data=str(tmp_path), held_out=0.5, num_workers=0)
    expected = {"ONNX": WAYS, "OpenVINO": WAYS, "ExecuTorch": (FLOAT, OURS)}
    assert [(row.runtime, row.way) for row in rows] == [(name, way) for name, ways in expected.items() for way in ways]
    assert len(said) == len(rows)
    assert all(row.same >= 80 for row in rows)
    assert all((row.lost is None) == (row.way == FLOAT) for row in rows)
    assert "| net | OpenVINO | onnxruntime.quantization |" in to_markdown(rows)


def test_every_way_has_a_writer():
    assert tuple(WRITERS) == WAYS

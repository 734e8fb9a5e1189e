import json
import math
import multiprocessing
import threading
from pathlib import Path

import pytest
import yaml
from tiny_run import curve

from linvit.analysis.cost import Cost
from linvit.cli import main
from linvit.studies.page import BEGIN, END, replace_between_marks
from linvit.studies.pool import Run, complete, run_all
from linvit.studies.study import Variant, compare, read_variants, study
from linvit.tasks.checkpoints import RunStoppedError

STUDY = Path(__file__).parents[2] / "recipes" / "study"
MODEL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
BASE = {
    "model": MODEL,
    "optimizer": {"lr": 1e-3},
    "data": {"name": "digits", "size": 32, "batch_size": 16, "held_out": 0.95},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 2},
}
ABOUT = "a page\n\n" + BEGIN + "\nold\n" + END + "\nits end\n"


def write_recipes(folder, epochs=1, lr=1e-3, names=("softmax", "linear")):
    folder.mkdir(exist_ok=True)
    values = {**BASE, "trainer": {**BASE["trainer"], "max_epochs": epochs}, "optimizer": {"lr": lr}}
    (folder / "base.yaml").write_text(yaml.safe_dump(values))
    for name in names:
        (folder / f"{name}.yaml").write_text(f"base: base.yaml\nmodel: {{name: deit_tiny_{name}}}\n")
    return folder


def run_of(recipes, folder, *overrides):
    return Run("softmax seed 0", recipes / "softmax.yaml", overrides, folder, {"overrides": list(overrides)})


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])  # each imports Lightning
def test_two_variants_two_seeds_from_recipes_to_page(tmp_path, capsys, workers):
    recipes, folder, page = write_recipes(tmp_path / "recipes"), tmp_path / "study", tmp_path / "results.md"
    page.write_text(ABOUT)
    arguments = ["study", "--recipes", str(recipes), "--folder", str(folder), "--seeds", "2", "--write", str(page)]
    arguments += ["--workers", workers]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "[4/4]" in printed
    results = json.loads((folder / "results.json").read_text())
    assert {one["variant"]: len(one["accuracies"]) for one in results["variants"]} == {"softmax": 2, "linear": 2}
    assert (results["about"]["train_images"], results["about"]["seeds"]) == (89, 2)
    csv = (folder / "results.csv").read_text().splitlines()
    assert len(csv) == 5
    text = page.read_text()
    assert text.startswith("a page\n\n" + BEGIN)
    assert text.endswith(END + "\nits end\n")
    assert "| `linear` |" in text
    assert "\nold\n" not in text
    assert (tmp_path / "study.svg").read_bytes() == (folder / "study.svg").read_bytes()
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    splits = [
        yaml.safe_load((folder / "linear" / f"seed{s}" / "recipe.yaml").read_text())["data"]["split"] for s in (0, 1)
    ]
    assert splits == [0, 1]

    made = [path.stat().st_mtime_ns for path in sorted(folder.rglob("result.json"))]
    assert main(arguments) == 0  # complete: nothing is trained again
    assert [path.stat().st_mtime_ns for path in sorted(folder.rglob("result.json"))] == made
    assert json.loads((folder / "results.json").read_text())["variants"] == results["variants"]

    write_recipes(recipes, lr=2e-3)
    assert main(arguments) == 2
    assert "holds a run with other settings" in capsys.readouterr().err


@pytest.mark.slow  # a process that imports Lightning
def test_a_run_whose_worker_is_killed_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    recipes, run = write_recipes(tmp_path / "recipes"), tmp_path / "run"
    epochs = ("trainer.max_epochs=4", "trainer.check_val_every_n_epoch=4", "data.held_out=0.3")
    same = run_of(recipes, run, *epochs)
    monkeypatch.setattr("linvit.studies.pool.connection.wait", Killing(run / "metrics.csv"))
    with pytest.raises(ConnectionError, match=r"softmax seed 0 died.*the same command goes on"):
        run_all([same], 1, lambda line: None)
    begun = len((run / "metrics.csv").read_text().splitlines()) - 1
    assert 1 <= begun < 4
    assert same.result() is None
    result = complete(same, threading.Event())
    assert same.result() == result
    assert len((run / "metrics.csv").read_text().splitlines()) == 5
    assert result["top1"] == complete(run_of(recipes, tmp_path / "whole", *epochs), threading.Event())["top1"]


class Killing:
    """multiprocessing.connection.wait that kills the one worker as soon as its first epoch is written."""

    def __init__(self, metrics):
        self.metrics, self.wait = metrics, multiprocessing.connection.wait

    def __call__(self, lines, timeout=None):
        while not self.metrics.exists() and not self.wait(lines, 0.02):
            pass
        (worker,) = multiprocessing.active_children()
        worker.kill()
        return self.wait(lines, timeout)


def test_a_loss_that_is_no_longer_finite_is_a_result(tmp_path):
    recipes = write_recipes(tmp_path / "recipes", lr=1e30)
    result = complete(run_of(recipes, tmp_path / "run"), threading.Event())
    assert result["top1"] is None
    assert "loss became" in result["reason"]
    assert run_of(recipes, tmp_path / "run").result() == result


def test_a_stopped_run_goes_on_from_its_last_epoch(tmp_path):
    epochs = ("trainer.max_epochs=3", "trainer.check_val_every_n_epoch=3")
    same = run_of(write_recipes(tmp_path / "recipes"), tmp_path / "run", *epochs)
    with pytest.raises(RunStoppedError):
        complete(same, StopsBeforeEpoch(3))
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3  # header and two epochs
    assert same.result() is None
    result = complete(same, threading.Event())
    assert same.result() == result
    whole = Run(same.label, same.recipe, epochs, tmp_path / "whole", same.values)
    assert result["top1"] == complete(whole, threading.Event())["top1"]
    assert curve(same.folder) == curve(whole.folder)


class StopsBeforeEpoch:
    """An event that is set when it is asked for the n-th time."""

    def __init__(self, number):
        self.left = number

    def is_set(self):
        self.left -= 1
        return self.left == 0


@pytest.mark.slow  # a process that imports Lightning
def test_ctrl_c_says_how_far_it_came(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.studies.pool.connection.wait", Interrupted())
    recipes = write_recipes(tmp_path / "recipes", epochs=500)
    with pytest.raises(RunStoppedError, match="0 of 1 runs complete: the same command goes on"):
        run_all([run_of(recipes, tmp_path / "run")], 1, lambda line: None)
    assert not multiprocessing.active_children()
    assert not (tmp_path / "run" / "result.json").exists()


class Interrupted:
    """multiprocessing.connection.wait with a Ctrl-C in its first call, as soon as the worker trains."""

    def __init__(self):
        self.calls = 0
        self.wait = multiprocessing.connection.wait

    def __call__(self, lines, timeout=None):
        self.calls += 1
        if self.calls == 1:
            self.wait(lines, 3)
            raise KeyboardInterrupt
        return self.wait(lines, timeout)


def variant(name, group="Mechanisms"):
    return Variant(name, group, Path(f"{name}.yaml"), {}, Cost(1000, 100, 10))


def test_differences_are_paired_and_corrected_over_the_variants():
    top1 = {
        "softmax": [0.90, 0.80, 0.85],
        "linear": [0.88, 0.79, 0.82],
        "rala": [0.91, 0.82, 0.86],
        "mala": [0.95, None, 0.90],
    }
    results = {name: [{"top1": value, "seconds": 2.0} for value in values] for name, values in top1.items()}
    rows = {row.variant: row for row in compare([variant(name) for name in top1], results)}
    assert rows["linear"].differences["softmax"].mean == pytest.approx(-2.0)
    assert set(rows["linear"].differences) == {"softmax"}
    assert rows["rala"].differences["linear"].mean == pytest.approx(10 / 3)
    assert rows["mala"].diverged == 1
    assert rows["mala"].accuracy.mean == pytest.approx(92.5)
    assert rows["mala"].differences["softmax"].count == 2
    assert math.isnan(rows["mala"].accuracies[1])
    p = {name: row.differences["softmax"].p for name, row in rows.items() if name != "softmax"}
    smallest = min(p, key=p.get)
    assert rows[smallest].corrected["softmax"] == pytest.approx(min(1, 3 * p[smallest]))


def test_the_text_between_the_marks_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(ABOUT)
    replace_between_marks(page, "new\n")
    replace_between_marks(page, "newer\n")
    assert page.read_text() == ABOUT.replace("old", "newer")


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, BEGIN + END + BEGIN, None])
def test_a_page_without_marks_is_refused_before_anything_runs(tmp_path, text):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(ValueError, match="no place for the tables"):
        study(write_recipes(tmp_path / "recipes"), tmp_path / "study", write=page)
    assert not (tmp_path / "study").exists()


def test_recipes_that_differ_in_their_budget_are_refused(tmp_path):
    recipes = write_recipes(tmp_path / "recipes")
    (recipes / "rala.yaml").write_text("base: base.yaml\nmodel: {name: deit_tiny_rala}\noptimizer: {lr: 9e-3}\n")
    with pytest.raises(ValueError, match="differ in more than the model"):
        read_variants(recipes)


def test_a_folder_without_the_baselines_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe linear\.yaml"):
        read_variants(write_recipes(tmp_path / "recipes", names=("softmax",)))


def test_too_few_seeds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="1 seeds and 2 workers"):
        study(tmp_path, tmp_path / "study", seeds=1)


def test_every_recipe_of_the_study_is_a_variant_with_an_equal_budget():
    variants = read_variants(STUDY)
    assert [one.name for one in variants[:2]] == ["linear", "softmax"]
    groups = {one.group for one in variants}
    assert groups == {"Mechanisms", "Parts of RALA", "Parts of MALA"}
    parameters = {one.name: one.cost.parameters for one in variants}
    assert abs(parameters["rala_wide"] - parameters["rala"]) < 0.005 * parameters["rala"]
    assert parameters["softmax"] == parameters["linear"]

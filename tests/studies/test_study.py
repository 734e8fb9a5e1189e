import gc
import json
import math
import multiprocessing
import re
import shlex
import shutil
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import timm
import torch
import yaml
from imagenet_folder import write_imagenet
from tiny_run import curve

from linvit.data.source import Source
from linvit.environment import describe
from linvit.files import write_csv
from linvit.runs.folder import RunStoppedError, read_curves
from linvit.studies import pool, study
from linvit.studies.ledger import Ledger, digest
from linvit.studies.papers import BASELINES, CLAIM_COLUMNS, best_first, marks, read_variants
from linvit.studies.plan import compared
from linvit.studies.pool import Training, complete, last_measures, run_all
from linvit.tasks.measures import Measure
from linvit_cli import main

STUDY = Path(__file__).parents[2] / "recipes" / "study"
MODEL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
BASE = {
    "model": MODEL,
    "optimizer": {"lr": 1e-3},
    "data": {"name": "digits", "size": 32, "batch_size": 16, "held_out": 0.95},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 2},
}
BEGIN, END = marks("recipes")  # the name of the folder
ABOUT = "a page\n\n" + BEGIN + "\nold\n" + END + "\nits end\n"


def write_recipes(folder, epochs=1, lr=1e-3, names=("softmax", "linear")):
    folder.mkdir(exist_ok=True)
    values = {**BASE, "trainer": {**BASE["trainer"], "max_epochs": epochs}, "optimizer": {"lr": lr}}
    (folder / "base.yaml").write_text(yaml.safe_dump(values))
    for name in names:
        (folder / f"{name}.yaml").write_text(f"base: base.yaml\nmodel: {{name: deit_tiny_{name}}}\n")
    return folder


def training_of(recipes, folder, *overrides):
    return Training("softmax seed 0", recipes / "softmax.yaml", overrides, folder, {"overrides": list(overrides)})


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])  # each imports Lightning
def test_two_variants_two_seeds_from_recipes_to_page(tmp_path, capsys, workers):
    recipes, folder, page = write_recipes(tmp_path / "recipes"), tmp_path / "study", tmp_path / "results.md"
    page.write_text(ABOUT)
    arguments = ["study", "--recipes", str(recipes), "--folder", str(folder), "--seeds", "2", "--write", str(page)]
    arguments += ["--workers", workers]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "[4/4]" in printed
    results = json.loads((folder / "recipes.json").read_text())
    assert {row["name"]: len(row["measures"]) for row in results["rows"]} == {"softmax": 2, "linear": 2}
    assert (results["about"]["train_images"], results["about"]["seeds"]) == (89, 2)
    csv = (folder / "recipes.csv").read_text().splitlines()
    assert len(csv) == 5
    text = page.read_text()
    assert text.startswith("a page\n\n" + BEGIN)
    assert text.endswith(END + "\nits end\n")
    assert "| `linear` |" in text
    assert "### Claims" in text
    assert "\nold\n" not in text
    assert "Vanilla linear attention is worse" in text
    assert "RALA is better" not in text  # only claims on these variants
    header, *claims = (folder / "recipes_claims.csv").read_text().splitlines()
    assert header == ",".join(CLAIM_COLUMNS)
    assert claims
    assert all(line.startswith("recipes,") for line in claims)
    assert (tmp_path / "recipes.svg").read_bytes() == (folder / "recipes.svg").read_bytes()
    assert (folder / "recipes.png").read_bytes().startswith(b"\x89PNG")
    splits = [
        yaml.safe_load((folder / "linear" / f"seed{s}" / "recipe.yaml").read_text())["data"]["split"] for s in (0, 1)
    ]
    assert splits == [0, 1]

    made = [path.stat().st_mtime_ns for path in sorted(folder.rglob("result.json"))]
    assert main(arguments) == 0  # complete: nothing is trained again
    assert [path.stat().st_mtime_ns for path in sorted(folder.rglob("result.json"))] == made
    assert json.loads((folder / "recipes.json").read_text())["rows"] == results["rows"]

    write_recipes(recipes, lr=2e-3)
    assert main(arguments) == 2
    assert "contains a run with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_another_machine_goes_on_from_the_ledger(tmp_path, capsys):
    recipes, ledger = write_recipes(tmp_path / "recipes"), tmp_path / "ledger.jsonl"
    arguments = ["study", "--recipes", str(recipes), "--workers", "1", "--ledger", str(ledger)]
    assert main([*arguments, "--seeds", "3", "--folder", str(tmp_path / "here")]) == 0
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [row["run"] for row in rows] == [
        f"{name} seed {seed}" for name in ("linear", "softmax") for seed in range(3)
    ]
    assert all(row["result"]["inside"]["entropy"] > 0 for row in rows)
    drawn = [f"recipes_{name}.svg" for name in ("ranks", "scores", "photograph", "magnitude")]
    page = tmp_path / "page.md"
    page.write_text(ABOUT)
    shutil.copy(tmp_path / "here" / drawn[0], page.with_name(drawn[0]))
    assert main([*arguments, "--seeds", "3", "--folder", str(tmp_path / "elsewhere"), "--write", str(page)]) == 0
    assert [name for name in drawn if f"]({name})" in page.read_text()] == drawn[:1]
    assert "The photograph comes with" not in page.read_text()
    assert {row["result"]["reason"] for row in rows} == {None}

    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:5]))
    capsys.readouterr()
    there = [*arguments, "--seeds", "2", "--first-seed", "1", "--folder", str(tmp_path / "there")]
    assert main(there) == 0
    printed = capsys.readouterr().out
    assert "3 of 4 runs are complete; about 1 min left" in printed
    assert "[4/4] softmax seed 2" in printed
    assert [path.parent.name for path in (tmp_path / "there").rglob("result.json")] == ["seed2"]
    text = (tmp_path / "there" / "recipes_from_1.md").read_text()
    assert "seeds 1 to 2, mean" in text
    assert "Inside the trained networks" in text
    assert "_ranks.svg" not in text, "seed 1 was trained elsewhere"
    one = json.loads((tmp_path / "here" / "recipes.json").read_text())
    two = json.loads((tmp_path / "there" / "recipes_from_1.json").read_text())
    inside = {measure: {name: of[1:] for name, of in values.items()} for measure, values in one["networks"].items()}
    assert inside == two["networks"]
    assert [row["measures"][1:] for row in one["rows"]] == [row["measures"] for row in two["rows"]]
    assert all((tmp_path / "here" / name).exists() for name in drawn)
    assert not (tmp_path / "there" / "recipes_from_1_ranks.svg").exists()
    assert main([*there, "--left"]) == 0
    assert "4 of 4 runs are complete" in capsys.readouterr().out

    arguments += ["--seeds", "2"]
    new = [*arguments, "--folder", str(tmp_path / "new"), "--set", "task.cpp=true", "--left"]
    assert main(new) == 0
    assert "4 of 4 runs are complete" in capsys.readouterr().out
    assert main([*new, "--set", "trainer.gradient_clip_val=1.0"]) == 2
    assert main([*arguments, "--left", "--set", "trainer.gradient_clip_val=1.0", "--set", "task.cpp=true"]) == 2
    assert capsys.readouterr().err.count("seed 0' with other settings: remove its line") == 2

    write_recipes(recipes, lr=2e-3)
    assert main([*arguments, "--folder", str(tmp_path / "new")]) == 2
    assert "seed 0' with other settings: remove its line" in capsys.readouterr().err


def test_a_ledger_is_checked_and_knows_settings_but_not_machines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    values = {
        "data": {"name": "cifar", "root": "a", "num_workers": 1, "size": 32},
        "task": {"mixup": 0.2},
        "trainer": {"accelerator": "cpu", "max_epochs": 2},
        "folder": "x",
    }
    Ledger(path).add("rala seed 0", values, {"measures": {"top1": 0.5}, "seconds": 1.0, "reason": None})
    row = json.loads(path.read_text())
    assert (row["lr"], row["clip"], row["kernel"]) == (None, None, "auto")
    more = {"optimizer": {"lr": 1e-3}, "task": {"cpp": True}, "trainer": {"gradient_clip_val": 1.0}}
    Ledger(tmp_path / "more.jsonl").add("rala seed 0", more, {"measures": {}})
    row = json.loads((tmp_path / "more.jsonl").read_text())
    assert (row["lr"], row["clip"], row["kernel"], bool(row["processor"])) == (1e-3, 1.0, "cpp", True)
    moved = {"data": values["data"] | {"root": "b", "cache": "c", "num_workers": 0}, "folder": "y"}
    moved["task"] = values["task"] | {"compile": True, "cpp": True}
    moved["trainer"] = values["trainer"] | {"accelerator": "gpu"}
    assert digest(moved) == digest(values)
    assert Ledger(path).result("rala seed 0", moved)["measures"] == {"top1": 0.5}
    assert Ledger(path).result("rala seed 1", moved) is None
    machine = describe(1, 1)
    assert Ledger(path).origins(["rala seed 0"]) == {
        "commits": [machine["commit"] or "unknown"],
        "machines": [", ".join(machine["devices"])],
        "torch": [machine["packages"]["torch"]],
    }
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match="line 2 is not a finished run"):
        Ledger(path)


def test_recipes_may_have_learning_rates_of_their_own(tmp_path):
    recipes = write_recipes(tmp_path / "recipes")
    (recipes / "linear.yaml").write_text("base: base.yaml\nmodel: {name: deit_tiny_linear}\noptimizer: {lr: 2e-3}\n")
    assert [plan.row()["lr"] for plan in read_variants(recipes)] == [2e-3, 1e-3]


@pytest.mark.slow  # a process that imports Lightning
def test_a_run_whose_worker_is_killed_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    recipes, run = write_recipes(tmp_path / "recipes"), tmp_path / "run"
    epochs = ("trainer.max_epochs=4", "trainer.check_val_every_n_epoch=4", "data.held_out=0.3")
    same = training_of(recipes, run, *epochs)
    monkeypatch.setattr(pool, "wait", Killing(run / "metrics.csv"))
    with pytest.raises(
        ConnectionError, match="The worker training softmax seed 0 was killed, often because it ran out of memory"
    ):
        run_all([same], 1, lambda line: None)
    begun = len((run / "metrics.csv").read_text().splitlines()) - 1
    assert 1 <= begun < 4
    assert same.result() is None
    result = complete(same, threading.Event())
    assert same.result() == result
    assert len((run / "metrics.csv").read_text().splitlines()) == 5
    whole = complete(training_of(recipes, tmp_path / "whole", *epochs), threading.Event())
    assert result["measures"]["top1"] == whole["measures"]["top1"]


class Killing:
    """concurrent.futures.wait that kills the one worker as soon as its first epoch is written."""

    def __init__(self, metrics):
        self.metrics = metrics

    def __call__(self, futures, **options):
        while not self.metrics.exists() and not wait(futures, 0.02).done:
            pass
        for worker in multiprocessing.active_children():
            worker.kill()
        return wait(futures, **options)


def test_a_worker_keeps_nothing_of_a_run(tmp_path):
    """A worker trains many runs; pixels of all of them would fill the memory."""
    recipes = write_recipes(tmp_path / "recipes")
    gc.collect()
    before = sum(issubclass(type(kept), Source) for kept in gc.get_objects())
    complete(training_of(recipes, tmp_path / "run"), threading.Event())
    assert sum(issubclass(type(kept), Source) for kept in gc.get_objects()) == before


def test_a_loss_that_is_no_longer_finite_is_a_result(tmp_path):
    recipes = write_recipes(tmp_path / "recipes", lr=1e12)
    result = complete(training_of(recipes, tmp_path / "run"), threading.Event())
    assert result["measures"] == {}
    assert "loss became" in result["reason"]
    assert training_of(recipes, tmp_path / "run").result() == result


def test_a_stopped_run_goes_on_from_its_last_epoch(tmp_path):
    epochs = ("trainer.max_epochs=3", "trainer.check_val_every_n_epoch=3")
    same = training_of(write_recipes(tmp_path / "recipes"), tmp_path / "run", *epochs)
    with pytest.raises(RunStoppedError):
        complete(same, StopsBeforeEpoch(3))
    before = read_curves(tmp_path / "run")
    assert len(before) == 2
    assert same.result() is None
    slow = [row | {"seconds": 1000.0} for row in before]
    write_csv(tmp_path / "run" / "metrics.csv", slow)
    result = complete(same, threading.Event())
    assert same.result() == result
    assert 2000 < result["seconds"] < 3000  # with the epochs from before
    whole = Training(same.label, same.recipe, epochs, tmp_path / "whole", same.values)
    assert result["measures"] == complete(whole, threading.Event())["measures"]
    assert curve(same.folder) == curve(whole.folder)


class StopsBeforeEpoch:
    """An event that is set when it is asked for the n-th time."""

    def __init__(self, number):
        self.left = number

    def is_set(self):
        self.left -= 1
        return self.left == 0


def test_ctrl_c_says_how_far_it_came(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "wait", Interrupted())
    recipes = write_recipes(tmp_path / "recipes", epochs=500)
    with pytest.raises(RunStoppedError, match="0 of 1 runs complete: start it again to resume"):
        run_all([training_of(recipes, tmp_path / "run")], 1, lambda line: None)
    assert not multiprocessing.active_children()
    assert not (tmp_path / "run" / "result.json").exists()


class Interrupted:
    """concurrent.futures.wait with a Ctrl-C in its first call, when the worker has begun."""

    def __init__(self):
        self.calls = 0

    def __call__(self, futures, **options):
        self.calls += 1
        if self.calls == 1:
            wait(futures, 3)
            raise KeyboardInterrupt
        return wait(futures, **options)


def test_differences_are_paired_and_corrected_over_the_variants():
    top1 = {
        "softmax": [0.90, 0.80, 0.85],
        "linear": [0.88, 0.79, 0.82],
        "rala": [0.91, 0.82, 0.86],
        "mala": [0.95, None, 0.90],
    }
    results = [
        [{"reason": None if v else "NaN", "seconds": 2.0, "measures": {"top1": v} if v else {}} for v in values]
        for values in top1.values()
    ]
    facts = [{"name": name, "value": None, "parameters": 1000} for name in top1]
    listed = compared(facts, results, {"top1": Measure("top-1", "share")}, BASELINES)
    assert [row.name for row in best_first(listed)] == ["mala", "rala", "softmax", "linear"]
    rows = {row.name: row for row in listed}
    assert rows["linear"].differences["softmax"].mean == pytest.approx(-2.0)
    assert set(rows["linear"].differences) == {"softmax"}
    assert rows["rala"].differences["linear"].mean == pytest.approx(10 / 3)
    assert rows["mala"].diverged == 1
    assert rows["mala"].mean.mean == pytest.approx(92.5)
    assert rows["mala"].differences["softmax"].count == 2
    assert math.isnan(rows["mala"].measures[1])
    p = {name: row.differences["softmax"].p for name, row in rows.items() if name != "softmax"}
    smallest = min(p, key=p.get)
    assert rows[smallest].corrected["softmax"] == pytest.approx(min(1, 3 * p[smallest]))


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
    (recipes / "rala.yaml").write_text("base: base.yaml\nmodel: {name: deit_tiny_rala}\ntrainer: {max_epochs: 9}\n")
    with pytest.raises(ValueError, match="differ in more than model and learning rate"):
        read_variants(recipes)


def test_a_folder_without_the_baselines_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe linear\.yaml"):
        read_variants(write_recipes(tmp_path / "recipes", names=("softmax",)))


def test_the_recipe_named_after_its_folder_is_the_only_baseline(tmp_path):
    recipes = write_recipes(tmp_path / "rala", names=("inline", "rala"))
    assert [plan.cell.name for plan in read_variants(recipes)] == ["rala", "inline"]


def test_too_few_seeds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`seeds` is 1, expected a whole number of 2 or more, because"):
        study(tmp_path, tmp_path / "study", seeds=1)


def test_every_recipe_of_the_study_is_a_variant_with_an_equal_budget():
    plans = read_variants(STUDY)
    assert [plan.cell.name for plan in plans[:2]] == ["linear", "softmax"]
    assert {plan.cell.group for plan in plans} == {"Mechanisms", "Parts of RALA", "Parts of MALA"}
    parameters = {plan.cell.name: plan.row()["parameters"] for plan in plans}
    assert abs(parameters["rala_wide"] - parameters["rala"]) < 0.005 * parameters["rala"]
    assert parameters["softmax"] == parameters["linear"]


def test_measures_are_those_of_the_last_epoch_and_of_the_average_where_it_alone_was_measured(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,lr,ema_fid,val_loss,ema_loss,seconds\n1,1,9,9,9,9\n2,1,4,0.5,0.25,9\n")
    assert last_measures(tmp_path) == {"fid": 4, "loss": 0.5}


def test_the_study_of_the_vit_at_imagenets_scale_by_three_settings(tmp_path):
    """The command of docs/evidence/real-images.md, with another root."""
    page = (STUDY.parents[1] / "docs" / "evidence" / "real-images.md").read_text()
    settings = re.search(r"--set (.*?)\n```", page.replace("\\\n", ""), re.DOTALL)[1]
    overrides = [setting.replace("/data/imagenet", str(tmp_path)) for setting in shlex.split(settings)]
    assert len(overrides) == 3
    write_imagenet(tmp_path)
    plans = read_variants(STUDY.parent / "evidence" / "vit", overrides)
    assert len(plans) == 18
    networks = {plan.cell.name: plan.task.network for plan in plans}
    published = timm.create_model("deit_tiny_patch16_224", num_classes=3)
    shapes = {name: value.shape for name, value in published.state_dict().items()}
    assert {name: value.shape for name, value in networks["softmax"].state_dict().items()} == shapes
    for plan in plans:
        assert plan.values["trainer"]["max_epochs"] == 300
        assert plan.source.preprocessing.size == (224, 224)
        assert networks[plan.cell.name](torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 3)

"""The study of the papers' claims: two tiny variants from their recipes to a page, and what a study refuses."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from imagenet_folder import write_imagenet
from tiny_study import write_recipes

from evidence.__main__ import main
from evidence.study import BASELINES, Runs, best_first, check_alike, marks
from evidence.study_page import CLAIM_COLUMNS
from linvit.studies.comparison import compared
from linvit.tasks.measures import Measure

STUDY = Path(__file__).parents[2] / "recipes" / "study"
BEGIN, END = marks("recipes")  # the name of the folder
ABOUT = "a page\n\n" + BEGIN + "\nold\n" + END + "\nits end\n"


@pytest.mark.slow
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


def candidates_of(recipes, overrides=()):
    found = Runs(recipes, Path("runs"), range(2), overrides=overrides).plan().candidates
    check_alike(found)
    return found


def test_recipes_may_have_learning_rates_of_their_own(tmp_path):
    recipes = write_recipes(tmp_path / "recipes")
    (recipes / "linear.yaml").write_text("base: base.yaml\nmodel: {name: deit_tiny_linear}\noptimizer: {lr: 2e-3}\n")
    assert [plan.row()["lr"] for plan in candidates_of(recipes)] == [2e-3, 1e-3]


def test_recipes_that_differ_in_their_budget_are_refused(tmp_path):
    recipes = write_recipes(tmp_path / "recipes")
    (recipes / "rala.yaml").write_text("base: base.yaml\nmodel: {name: deit_tiny_rala}\ntrainer: {max_epochs: 9}\n")
    with pytest.raises(ValueError, match="differ in more than model and learning rate"):
        candidates_of(recipes)


def test_the_recipe_named_after_its_folder_is_the_only_baseline(tmp_path):
    recipes = write_recipes(tmp_path / "rala", names=("inline", "rala"))
    assert [plan.cell.name for plan in candidates_of(recipes)] == ["rala", "inline"]


def test_every_recipe_of_the_study_is_a_variant_with_an_equal_budget():
    plans = candidates_of(STUDY)
    assert [plan.cell.name for plan in plans[:2]] == ["linear", "softmax"]
    assert {plan.cell.group for plan in plans} == {"Mechanisms", "Parts of RALA", "Parts of MALA"}
    parameters = {plan.cell.name: plan.row()["parameters"] for plan in plans}
    assert abs(parameters["rala_wide"] - parameters["rala"]) < 0.005 * parameters["rala"]
    assert parameters["softmax"] == parameters["linear"]


@pytest.mark.slow
def test_the_study_of_the_vit_at_imagenets_scale_by_three_settings(tmp_path):
    """The command of docs/evidence/real-images.md, with another root."""
    page = (STUDY.parents[1] / "docs" / "evidence" / "real-images.md").read_text()
    settings = re.search(r"--set (.*?)\n```", page.replace("\\\n", ""), re.DOTALL)[1]
    overrides = [setting.replace("/data/imagenet", str(tmp_path)) for setting in shlex.split(settings)]
    assert len(overrides) == 3
    write_imagenet(tmp_path)
    plans = candidates_of(STUDY.parent / "evidence" / "vit", overrides)
    assert len(plans) == 18
    networks = {plan.cell.name: plan.task.network for plan in plans}
    published = timm.create_model("deit_tiny_patch16_224", num_classes=3)
    shapes = {name: value.shape for name, value in published.state_dict().items()}
    assert {name: value.shape for name, value in networks["softmax"].state_dict().items()} == shapes
    for plan in plans:
        assert plan.values["trainer"]["max_epochs"] == 300
        assert plan.source.preprocessing.size == (224, 224)
        assert networks[plan.cell.name](torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 3)


def test_the_best_comes_first_and_what_diverged_last():
    top1 = {"softmax": 0.8, "linear": None, "rala": 0.9}
    results = [
        [{"reason": None if v else "NaN", "seconds": 2.0, "measures": {"top1": v} if v else {}}] for v in top1.values()
    ]
    facts = [{"name": name, "value": None, "parameters": 1000} for name in top1]
    rows = compared(facts, results, {"top1": Measure("top-1", "share")}, BASELINES)
    assert [row.name for row in best_first(rows)] == ["rala", "softmax", "linear"]


def test_what_cannot_be_a_study_is_refused_before_anything_runs(tmp_path):
    recipes, page = write_recipes(tmp_path / "recipes"), tmp_path / "page.md"
    for text in ("", END + BEGIN):
        page.write_text(text)
        with pytest.raises(ValueError, match="no place for the tables"):
            Runs(recipes, tmp_path / "study", range(2)).study(write=page)
    with pytest.raises(ValueError, match="A study has 1 seeds, expected 2 or more, because intervals need two"):
        Runs(recipes, tmp_path / "study", range(1))
    with pytest.raises(ValueError, match=r"no recipe linear\.yaml"):
        Runs(write_recipes(tmp_path / "other", names=("softmax",)), tmp_path / "study", range(2)).study()
    assert not (tmp_path / "study").exists()

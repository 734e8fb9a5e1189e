import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from linvit.models.published import ROWS
from linvit.runs.bundled import header
from linvit.runs.recipe import Recipe, base_of, merge, read_recipe
from linvit.runs.tasks import RUNS
from linvit.runs.training import train_folder

ROOT = Path(__file__).parents[1]
EVERY = sorted((ROOT / "recipes").rglob("*.yaml"))
RECIPES = [path for path in EVERY if path.name != "base.yaml"]
LARGER = re.compile("_(small|base|large|s1|s2)$")  # tests/analysis/test_dense_cost.py builds detectors on these
TRAINED = "mechanisms"  # tests/test_mechanism_recipes.py trains these for a step
named = {"ids": lambda path: str(path.relative_to(ROOT / "recipes"))}


def test_there_are_recipes_and_git_knows_them():
    listed = subprocess.run(["git", "ls-files", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {line for line in listed.stdout.split() if line.endswith(".yaml")}
    assert {str(path.relative_to(ROOT)) for path in EVERY} == tracked
    assert len(RECIPES) >= 4


@pytest.mark.parametrize("path", EVERY, **named)
def test_header_says_what_it_reproduces_costs_and_how_to_run(path):
    lines = path.read_text().splitlines()
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    published = next(line for line in header if line.startswith("# published: "))
    assert published.partition("ours: ")[2].strip()
    assert any(line.startswith("# cost: ") for line in header)
    run = next(line for line in header if line.startswith("# run:  "))
    assert "linvit train recipes/" in run
    assert path.name == "base.yaml" or str(path.relative_to(ROOT)) in run


@pytest.mark.parametrize("path", EVERY, **named)
def test_published_numbers_of_the_header_are_those_of_their_table(path):
    """Such as "top-1 82.8 % (RALA, Table 3, RAVLT-T)"; several rows are separated by "; "."""
    text = header(path)["published"]
    if text.startswith(("nothing", "see the recipes", "not in the paper", "no number in the paper's text")):
        assert not re.search(r"\d\.\d|\d %", text)
        return
    for part in text.split("; "):
        numbers, _, citation = part.removesuffix(")").partition(" (")
        cells = numbers.split(", ")
        assert set(cells) <= set(ROWS[citation].cells())
        assert len(cells) == len(set(cells))


@pytest.mark.parametrize("path", RECIPES, **named)
def test_recipe_is_accepted_and_builds_its_network(path):
    cli = Recipe(read_recipe(path))
    values = cli.resolved()
    if LARGER.search(values["model"].get("backbone", "")) or TRAINED in path.parts:
        return
    with torch.device("meta"):
        run = RUNS[values["task"]["name"]]
        task = run.create_task(run.create_network(values["model"], 10, 3), 10)
    assert sum(parameter.numel() for parameter in task.network.parameters()) > 10_000


@pytest.mark.parametrize("path", RECIPES, **named)
def test_resolved_recipe_is_a_recipe_that_says_the_same(path, tmp_path):
    values = Recipe(read_recipe(path)).resolved()
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(values))
    assert Recipe(read_recipe(copy)).resolved() == values


@pytest.mark.parametrize("path", [path for path in RECIPES if path.parent.name == "demo"], **named)
def test_demo_recipe_takes_two_steps(path, tmp_path):
    few = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
    run = train_folder(path, [f"folder={tmp_path / 'run'}", *few])
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2


def test_demo_recipes_differ_in_the_model_and_its_learning_rate_alone():
    demo = [Recipe(read_recipe(path)).resolved() for path in RECIPES if path.parent.name == "demo"]
    models = [values.pop("model") for values in demo]
    rates = {model["name"]: values["optimizer"].pop("lr") for model, values in zip(models, demo, strict=True)}
    assert rates == {"ravlt_nano": 2e-3, "mavit_nano": 2e-3, "care_nano": 4e-3}
    assert len({values.pop("folder") for values in demo}) == 4
    assert all(values == demo[0] for values in demo)
    assert len({str(model) for model in models}) == 4


def test_overrides_win_over_the_recipe_and_the_recipe_over_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 1e-3, weight_decay: 0.1}\ndata: {name: digits, size: 32}\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: base.yaml\noptimizer: {lr: 2e-3}\n")
    values = read_recipe(recipe, ["data.size=64", "trainer.max_epochs=3", "task.ema_decay=null"])
    assert values["optimizer"] == {"lr": 2e-3, "weight_decay": 0.1}
    assert values["data"] == {"name": "digits", "size": 64}
    assert values["trainer"]["max_epochs"] == 3
    assert values["task"]["ema_decay"] is None
    assert values["folder"] == "runs/mine"


def test_a_base_may_have_a_base_in_another_folder(tmp_path):
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "lowest.yaml").write_text("seed: 1\noptimizer: {lr: 1e-3, weight_decay: 0.1}\n")
    (tmp_path / "base.yaml").write_text("base: low/lowest.yaml\noptimizer: {lr: 2e-3}\n")
    (tmp_path / "low" / "mine.yaml").write_text("base: ../base.yaml\nseed: 3\n")
    values = read_recipe(tmp_path / "low" / "mine.yaml")
    assert values == {"seed": 3, "optimizer": {"lr": 2e-3, "weight_decay": 0.1}, "folder": "runs/mine"}
    assert base_of(tmp_path / "low" / "mine.yaml").samefile(tmp_path / "base.yaml")
    assert base_of(tmp_path / "low" / "lowest.yaml") is None


@pytest.mark.parametrize("last", ["mine", "base"])
def test_bases_in_a_circle_are_refused(last, tmp_path):
    (tmp_path / "mine.yaml").write_text("base: base.yaml\n")
    (tmp_path / "base.yaml").write_text(f"base: {last}.yaml\n")
    with pytest.raises(ValueError, match=rf"mine.yaml comes back to {last}.yaml through its bases: remove `base`"):
        read_recipe(tmp_path / "mine.yaml")


def test_a_missing_base_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(ValueError, match=r"no recipe at .*nowhere.yaml"):
        read_recipe(tmp_path / "mine.yaml")


def test_merge_leaves_both_sides_as_they_were():
    below, above = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(below, above) == {"a": {"b": 1, "c": 2}}
    assert (below, above) == ({"a": {"b": 1}}, {"a": {"c": 2}})


def test_another_name_keeps_the_other_keys_of_its_group(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: {name: ravlt_nano, pattern: SSSS}\ndata: {name: digits, max_shift: 2}\n")
    values = read_recipe(recipe, ["model.name=mavit_nano", "data.name=imagefolder"])
    assert values["model"] == {"name": "mavit_nano", "pattern": "SSSS"}
    with pytest.raises(
        ValueError,
        match=r"settings that the data 'imagefolder' does not know: data\.max_shift\. Remove .* `linvit new` writes",
    ):
        Recipe(values)

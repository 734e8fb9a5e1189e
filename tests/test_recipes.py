import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from tiers import slow

from evidence.published import ROWS
from linvit.bundled import header
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import base_of, dump_yaml, load_yaml, merge, read_recipe
from linvit.runs.tasks import RUNS
from linvit.runs.training import train_folder

ROOT = Path(__file__).parents[1]
EVERY = sorted((ROOT / "recipes").rglob("*.yaml"))
RECIPES = [path for path in EVERY if path.name != "base.yaml"]
LARGER = re.compile("_(small|base|large|s1|s2)$")  # tests/evidence/test_dense_cost.py builds detectors on these
TRAINED = "mechanisms"  # tests/test_mechanism_recipes.py trains these for a step


@pytest.fixture(scope="module")
def resolved():
    return {path: Recipe(read_recipe(path)).resolved() for path in RECIPES}


def test_there_are_recipes_and_git_knows_them():
    listed = subprocess.run(["git", "ls-files", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {line for line in listed.stdout.split() if line.endswith(".yaml")}
    assert {str(path.relative_to(ROOT)) for path in EVERY} == tracked
    assert len(RECIPES) >= 4


def test_headers_say_what_they_reproduce_cost_and_how_to_run():
    for path in EVERY:
        lines = path.read_text().splitlines()
        comments = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
        facts = header(path)
        assert facts["published"], path
        assert facts["ours"], path
        assert facts["cost"], path
        run = next(line for line in comments if line.startswith("# run:  "))
        assert "linvit train recipes/" in run, path
        assert path.name == "base.yaml" or str(path.relative_to(ROOT)) in run, path


def test_published_numbers_of_the_headers_are_those_of_their_tables():
    """Such as "top-1 82.8 % (RALA, Table 3, RAVLT-T)"; several rows are separated by "; "."""
    for path in EVERY:
        text = header(path)["published"]
        if text.startswith(("nothing", "see the recipes", "not in the paper", "no number in the paper's text")):
            assert not re.search(r"\d\.\d|\d %", text), path
            continue
        for part in text.split("; "):
            numbers, _, citation = part.removesuffix(")").partition(" (")
            cells = numbers.split(", ")
            assert set(cells) <= set(ROWS[citation].cells()), (path, part)
            assert len(cells) == len(set(cells)), (path, part)


def test_recipes_are_accepted_and_say_the_same_when_resolved(resolved):
    for path, values in resolved.items():
        assert Recipe(values).resolved() == values, path
        assert load_yaml(dump_yaml(values)) == values, path


@pytest.mark.slow
def test_networks_of_recipes_can_be_built(resolved):
    models = {}  # many recipes share one
    for path, values in resolved.items():
        if not LARGER.search(values["model"].get("backbone", "")) and TRAINED not in path.parts:
            models[json.dumps([values["task"]["name"], values["model"]])] = path
    for key, path in models.items():
        task, model = json.loads(key)
        with torch.device("meta"):
            run = RUNS[task]
            network = run.create_network(model, 10, 3)
        assert sum(parameter.numel() for parameter in network.parameters()) > 10_000, path


@pytest.mark.parametrize(
    "name", ["ravlt_nano_digits", "care_nano_digits", *slow("mavit_nano_digits", "softmax_nano_digits")]
)
def test_demo_recipe_takes_two_steps(name, tmp_path):
    path = ROOT / "recipes" / "demo" / f"{name}.yaml"
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

"""The README's code runs, and its table is what the package computes."""

import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_diffusion import write_diffusion_recipe
from tiny_language import write_language_recipe

from linvit import runs
from linvit.models.listed import list_networks
from linvit_cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run_block(word, change=lambda code: code):
    (code,) = [code for code in blocks("python") if word in code]
    names = {}
    exec(compile(change(code), "README.md", "exec"), names)
    return names


def test_models_swap_and_operators_run():
    names = run_block("features_only")
    assert names["logits"].shape == (1, 10)
    assert [image_map.shape[-1] for image_map in names["maps"]] == [40, 20, 10, 5]
    swapped = run_block("swap_attention")
    image = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(swapped["fused"](image), swapped["vit"](image), rtol=1e-4, atol=1e-4)
    assert run_block("rotary_2d")["matrix"].shape == (2, 4, 126, 126)


@pytest.fixture
def short_trainings(monkeypatch):
    """Trainings of two batches."""
    whole = runs.train

    def short(recipe, overrides=None, **options):
        return whole(recipe, {**(overrides or {}), "trainer.limit_train_batches": 2}, **options)

    monkeypatch.setattr(runs, "train", short)


@pytest.mark.usefixtures("short_trainings")
def test_the_tour_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for path in ("photos/a.png", "digit.png"):
        Image.effect_noise((40, 50), 60).save(path)
    names = run_block('linvit.train("demo')
    assert 0 <= names["measures"]["top1"] <= 1
    assert len(names["run"].metrics) == 3
    assert [len(row.classes) for row in names["predictions"]] == [3, 3]
    assert Path("predictions.csv").read_text().count("\n") == 3
    assert Path("runs/tour/report.html").is_file()
    assert Path("runs/tour/analysis/report.html").is_file()


@pytest.mark.usefixtures("short_trainings")
def test_own_images_are_trained_on(tmp_path, monkeypatch):
    """With a smaller model and a single epoch."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for number in range(8):
            Image.effect_noise((32, 32), 60).save(f"photos/{name}/{number}.png")
    small = ('"my.yaml", folder', '"my.yaml", {"trainer.max_epochs": 1}, folder')
    names = run_block("new_recipe(", lambda code: code.replace("mavit_tiny", "mavit_nano").replace(*small))
    assert names["mine"].class_names == ["cat", "dog"]


def test_what_generates_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = {"max_epochs": 1, "limit_train_batches": 2}
    for name, write, groups in (
        ("digits_mala", write_diffusion_recipe, {"task": {"generates": False}}),
        ("stdlib_bytes_mala", write_language_recipe, {}),
    ):
        Path(name).mkdir()
        runs.train(write(Path(name), trainer=few, **groups), folder=f"runs/{name}")
    run_block("generate(prompt")
    assert Image.open("digits.png").height < Image.open("digits.png").width
    assert capsys.readouterr().out.startswith("def ")


def test_shell_blocks_name_existing_commands_and_goals():
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert len(lines) > 5
    goals = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in lines:
        assert words[:2] == ["pip", "install"] or words[1] in (COMMANDS if words[0] == "linvit" else goals)


def test_table_is_what_the_package_computes():
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([\d,]+) \| ([\d.]+) G \| ([\d.]+) G \| ([\d.]+) % \|", README, re.MULTILINE
    )
    assert len(rows) == 11
    models = {row["name"]: row for family in ("ravlt", "mavit", "care") for row in list_networks(family=family)}
    for name, pattern, parameters, macs, attention, published in rows:
        model = models[name]
        assert pattern == model["pattern"]
        assert parameters == f"{model['parameters']:,}"
        assert macs == f"{model['macs'] / 1e9:.2f}"
        assert attention == f"{model['macs_attention'] / 1e9:.2f}"
        assert float(published) == model["published_top1"]


def test_readme_is_short():
    assert len(README.splitlines()) <= 250

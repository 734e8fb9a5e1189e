"""The code of the pages in docs/start, and of those in docs/use and docs/understand that have no test of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_diffusion import write_diffusion_recipe
from tiny_language import write_language_recipe

from linvit import runs

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def run_block(page, word, change=lambda code: code):
    (code,) = [code for code in blocks(page) if word in code]
    names = {}
    exec(compile(change(code), page, "exec"), names)
    return names


def test_models_swap_and_operators_run():
    names = run_block("start/python.md", "features_only")
    assert names["logits"].shape == (1, 10)
    assert [image_map.shape[-1] for image_map in names["maps"]] == [40, 20, 10, 5]
    swapped = run_block("start/python.md", "swap_attention")
    image = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        torch.testing.assert_close(swapped["fused"](image), swapped["vit"](image), rtol=1e-4, atol=1e-4)
    assert run_block("start/python.md", "rotary_2d")["matrix"].shape == (2, 4, 126, 126)


@pytest.fixture
def short_trainings(monkeypatch):
    """Trainings and validations of two batches."""
    whole = runs.train

    def short(recipe, overrides=None, **options):
        return whole(
            recipe, {**(overrides or {}), "trainer.limit_train_batches": 2, "trainer.limit_val_batches": 2}, **options
        )

    monkeypatch.setattr(runs, "train", short)


@pytest.mark.usefixtures("short_trainings")
def test_the_tour_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for path in ("photos/a.png", "digit.png"):
        Image.effect_noise((40, 50), 60).save(path)
    names = run_block("start/python.md", 'linvit.train("demo')
    assert 0 <= names["measures"]["top1"] <= 1
    assert len(names["run"].history) == 3
    assert [len(row.classes) for row in names["predictions"]] == [3, 3]
    assert Path("predictions.csv").read_text().count("\n") == 3
    assert Path("runs/tour/report.html").is_file()
    assert Path("runs/tour/analysis/report.html").is_file()


@pytest.mark.usefixtures("short_trainings")
def test_own_images_are_trained_on(tmp_path, monkeypatch):
    """With a single epoch."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for number in range(8):
            Image.effect_noise((32, 32), 60).save(f"photos/{name}/{number}.png")
    small = ('"my.yaml", folder', '"my.yaml", {"trainer.max_epochs": 1}, folder')
    change = lambda code: code.replace(*small)  # noqa: E731
    names = run_block("start/python.md", "new_recipe(", change)
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
    run_block("use/index.md", "generate(prompt")
    assert Image.open("digits.png").height < Image.open("digits.png").width
    assert capsys.readouterr().out.startswith("def ")


def test_the_formula_step_by_step_is_the_operator():
    """Its blocks compare every step with linvit.ops."""
    names = {}
    for code in blocks("understand/formula.md"):
        exec(compile(code, "formula.md", "exec"), names)
    assert names["matrix"].shape == names["scores"].shape == (1, 2, 6, 6)
    assert names["turned"].shape == (1, 2, 6, 4)


def test_torchvision_detects_with_a_backbone():
    assert run_block("use/backbones.md", "FasterRCNN")["boxes"].shape[1] == 4


def test_swapped_networks_run():
    code = "\n".join(blocks("use/swap.md"))
    names = {}
    exec(compile(code, "swap.md", "exec"), names)
    assert names["logits"].shape == (1, 1000)
    assert names["both"].shape == (2, 1000)
    assert names["swin"].pattern == names["same"].pattern == "LLSS"


def test_one_s_own_loop_runs(tmp_path, monkeypatch):
    """In a process of its own, which has imported nothing else."""
    (code,) = blocks("use/own-loop.md")
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    subprocess.run([sys.executable, "-c", f"{code}\nassert loss.isfinite()"], cwd=tmp_path, check=True)
    assert (tmp_path / "checkpoint.pt").is_file()


def test_attention_maps_and_the_network_instead_of_mamba():
    attention_map = run_block("use/attention-maps.md", "attention_scores")["attention_map"]
    assert attention_map.shape == (14, 14)
    torch.testing.assert_close(attention_map.sum(), torch.tensor(1.0))
    names = run_block("use/mamba.md", "swap_attention")
    torch.testing.assert_close(
        names["exported"].module()(torch.ones(1, 3, 448, 448)), names["vit"](torch.ones(1, 3, 448, 448))
    )

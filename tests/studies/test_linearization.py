"""Plans: which blocks become linear, from errors and times; recipes trained in turn."""

import json

import pytest
import timm
import torch
from tiny_students import BASE, STUDENT, write_student_recipe

import linvit
from linvit.analysis.markdown import marks
from linvit.models import linearizing
from linvit.models.linearizing import lessons, letters_of
from linvit.runs import train
from linvit.runs.training import train_in_turn
from linvit.studies import linearization, plan_linearization
from linvit.studies.plan import Hybrid, Letter, LinearizationPlan, Proposal, Times
from linvit_cli import main

DEEP = {"base": {**BASE, "depth": 3}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_student_recipe(tmp_path_factory.mktemp("aligned"), model={**STUDENT, **DEEP})


@pytest.fixture(scope="module")
def run(recipe):
    return train(recipe)


@pytest.mark.parametrize("name", ["vit", "swin", "ravlt"])
def test_a_hybrid_is_the_network_with_that_pattern(name):
    torch.manual_seed(0)
    swin = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "window_size": 2}
    teacher = {
        "vit": lambda: linearizing.Origin({**BASE, "depth": 3}, {}).teacher(),
        "swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", **swin),
        "ravlt": lambda: timm.create_model("ravlt_nano", pattern="SSSS"),
    }[name]()
    teacher.eval()
    student = linvit.linearize(teacher, "rala")
    hybrid = Hybrid(student, lessons(student, teacher), letters_of(teacher))
    images = torch.randn(2, 3, 32, 32)
    for pattern in ("S" * hybrid.count, "L" * hybrid.count, "LS" + "S" * (hybrid.count - 2)):
        with torch.inference_mode():
            expected = linvit.linearize(teacher, "rala", pattern).forward_features(images)
        assert torch.equal(hybrid.features(pattern, images), expected)


def test_times_are_measured_at_the_wanted_size_in_the_dtype_of_the_device(run, tmp_path, monkeypatch):
    monkeypatch.setitem(linearization.DTYPES, "cpu", torch.bfloat16)
    plan = plan_linearization(run, size=(16, 24), images=4, rounds=3, output=tmp_path)
    assert all(letter.softmax_ms > 0 and letter.linear_ms > 0 for letter in plan.letters)
    assert plan.proposals[0].ms > 0
    assert "times at 16×24 px, batch 1, bfloat16" in plan.about
    assert plan.chosen is None


def test_a_plan_says_that_nothing_is_gained(run, monkeypatch):
    monkeypatch.setattr(Times, "of_layers", lambda *_: {f"blocks.{i}.attn": (1, 2) for i in range(3)})
    plan = plan_linearization(run, images=4, rounds=3)
    assert [proposal.pattern for proposal in plan.proposals] == ["SSS"]
    assert (
        plan.advice == "No linear attention saves time at this size: keep softmax attention, or plan for a larger one."
    )
    assert plan.markdown().endswith(f"{plan.advice}\n")
    assert [text.get_text() for text in plan.figure().axes[1].texts] == ["3 softmax"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_times_on_a_gpu(run):
    plan = plan_linearization(run, images=4, device="cuda")
    assert all(letter.error > 0 and letter.softmax_ms > 0 and letter.linear_ms > 0 for letter in plan.letters)
    assert f"batch 1, bfloat16, median of 7\nrounds, {torch.cuda.get_device_name()};" in plan.about


def test_what_a_plan_cannot_be(run, long_softmax, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"`budget` is 10 ms, but the fastest pattern takes 30\.00 ms: allow more"):
        plan_linearization(run, budget=10, images=4, output=tmp_path)
    assert (tmp_path / "plan.md").is_file()
    with pytest.raises(ValueError, match="`budget` is 0, expected a number above 0"):
        plan_linearization(run, budget=0)
    with pytest.raises(ValueError, match="`device` is 'gpu', expected one of cpu, cuda: change it"):
        plan_linearization(run, device="gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="`device` is 'cuda', but torch sees no GPU here: leave it out to measure"):
        plan_linearization(run, device="cuda")
    with pytest.raises(ValueError, match="`size` is 4×4, but deit_tiny_patch16_224 cannot take it: `grid`"):
        plan_linearization(run, size=4, images=4)
    with pytest.raises(ValueError, match="`write` is set, but not `output`, whose name its marks have: set both"):
        plan_linearization(run, write=tmp_path / "page.md")
    with pytest.raises(ValueError, match="has no place for the tables: add the lines <!-- plan:begin -->"):
        plan_linearization(run, output=tmp_path / "plan", write=tmp_path / "page.md")
    said = []
    with pytest.raises(OSError, match="cannot be written"):
        plan_linearization(run, images=4, output=tmp_path / "plan.md", progress=said.append)
    assert not said
    other = train(write_student_recipe(tmp_path / "other", kind="classification"))
    with pytest.raises(ValueError, match="is not of the task alignment: train a recipe with that task first"):
        plan_linearization(other)


@pytest.mark.usefixtures("long_softmax", "run")
def test_the_command_plans_for_what_is_trained(recipe, tmp_path, capsys):
    folder, written = tmp_path / "vit", tmp_path / "page.md"
    written.write_text("\n".join(["before", *marks("vit"), "after"]))
    arguments = ["linearize", str(recipe), "--plan", "--budget", "36", "--images", "8"]
    assert main([*arguments, "--output", str(folder), "--write", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "Chosen: " in printed
    page = folder / "report.html"
    assert str(page) in printed.replace("\n", "")
    assert "<h2>Patterns</h2>" in page.read_text()
    plan = json.loads((folder / "plan.json").read_text())
    assert [letter["layers"] for letter in plan["letters"]] == [[f"blocks.{place}.attn"] for place in range(3)]
    assert plan["proposals"][-1]["ms"] == 30
    assert (folder / "plan.md").read_text().endswith(f"\n\nChosen: {plan['chosen']['pattern']}.\n")
    text = written.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "![error and time](vit_plan.svg)" in text
    assert "| letter |" in text
    assert (tmp_path / "vit_plan.svg").read_bytes() == (folder / "plan.svg").read_bytes()


def test_a_missing_gpu_is_found_before_the_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = write_student_recipe(tmp_path)
    assert main(["linearize", str(recipe), "--plan", "--device", "cuda"]) != 0
    assert "--device is 'cuda', but torch sees no GPU here: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_recipes_in_turn_start_from_one_another(tmp_path):
    align = write_student_recipe(tmp_path / "align")
    transfer = write_student_recipe(tmp_path / "transfer", kind="transfer")
    last = train_in_turn([align, transfer])
    assert last.folder == tmp_path / "transfer" / "run"
    assert str(tmp_path / "align" / "run") in (last.folder / "recipe.yaml").read_text()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.ckpt")}
    train_in_turn([align, transfer])
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.ckpt")}
    with pytest.raises(ValueError, match="Two recipes have the folder"):
        train_in_turn([align, align])


def test_a_figure_of_many_proposals_names_the_ends():
    letters = tuple(Letter(i, (f"blocks.{i}.attn",), 0.01 * (i + 1), 4.0, 2.0) for i in range(12))
    patterns = ["L" * i + "S" * (12 - i) for i in range(13)]
    proposals = tuple(Proposal(p, 0.01 * i, 0.012 * i, 50 - 2 * i, 51 - 2 * i) for i, p in enumerate(patterns))
    plan = LinearizationPlan(letters, proposals, proposals[6], "about")
    texts = {text.get_text() for text in plan.figure().axes[1].texts}
    assert texts == {"12 softmax", "0 softmax"}

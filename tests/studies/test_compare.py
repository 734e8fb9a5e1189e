import json
import math
from pathlib import Path

import pytest
from tiny_dense import tiny_scenes, write_dense_recipe
from tiny_diffusion import write_diffusion_recipe
from tiny_run import write_recipe

from linvit.analysis.markdown import marks
from linvit.studies import Comparison, compare
from linvit.studies.comparison import compared, folder_name
from linvit.studies.table import over_figure
from linvit.tasks.measures import Measure
from linvit_cli import main

ABOUT = {
    "parameters": [1234, 1234],
    "data": "recall",
    "model": "sequence_nano",
    "epochs": 3,
    "seeds": 3,
    "precision": None,
    "commits": ["unknown"],
    "first_seed": 0,
    "machines": ["x86_64, 2 cores", "NVIDIA H200"],
    "torch": ["2.15.0", "2.11.0"],
}
MEASURES = {"recall_accuracy": Measure("answers", "share"), "loss": Measure("loss", "number")}


def ended(*values):
    """What runs ended with whose measures are these, None for one that was not finite."""
    return [
        {"reason": None, "seconds": 5.0, "measures": {"recall_accuracy": value, "loss": 1.5}}
        if value is not None
        else {"reason": "NaN", "seconds": 5.0, "measures": {}}
        for value in values
    ]


RESULTS = {
    ("softmax", "4"): ended(0.99, 0.98, 0.97),
    ("mala", "4"): ended(0.90, 0.91, 0.89),
    ("softmax", "8"): ended(0.95, 0.94, None),
    ("mala", "8"): ended(0.50, 0.52, 0.51),
}
FACTS = [{"name": name, "value": value, "parameters": 1234} for name, value in RESULTS]
ROWS = compared(FACTS, list(RESULTS.values()), MEASURES, ["softmax"])
COMPARISON = Comparison(ROWS, "recall_accuracy", MEASURES, ABOUT, ["softmax"], "data.pairs")


def test_the_table_says_mean_interval_and_difference():
    lines = COMPARISON.to_markdown().splitlines()
    head = "| recipe | `data.pairs` | parameters | answers, % | Δ softmax | p | loss | diverged | s per run |"
    assert lines[0] == head
    assert lines[2] == "| `softmax` | 4 | 1,234 | 98.00 ± 2.48 | – | – | 1.500 ± 0.000 | 0 of 3 | 5 |"
    assert "-8.00 [-10.48, -5.52] | 0.010 |" in lines[3]  # p of 0.005, twice by Holm
    assert lines[-1].startswith("*Small networks of 1,234 parameters, sequence_nano; recall; seeds 0 to 2,")
    assert lines[-1].endswith("; x86_64, 2 cores and NVIDIA H200; torch 2.15.0 and 2.11.0, commit unknown.*")


def test_a_run_with_nothing_to_measure_has_not_diverged():
    results = [ended(0.9, 0.9, 0.9), ended(math.nan, 0.9, None)]
    rows = compared(FACTS[:2], results, MEASURES, ["softmax"])
    assert [(row.diverged, row.unmeasured) for row in rows] == [(0, 0), (1, 1)]
    table = Comparison(rows, "recall_accuracy", MEASURES, ABOUT, ["softmax"]).to_markdown()
    assert "| diverged | unmeasured | s per run |" in table
    rows = compared(FACTS[:1], [ended(math.nan)], MEASURES, [])
    assert "diverged" not in Comparison(rows, "recall_accuracy", MEASURES, ABOUT, []).to_markdown()


def test_epochs_are_a_column_where_they_differ():
    facts = [{**fact, "epochs": epochs} for fact, epochs in zip(FACTS, (2, 5, 2, 5), strict=True)]
    rows = compared(facts, list(RESULTS.values()), MEASURES, ["softmax"])
    about = {**ABOUT, "epochs": None}
    lines = Comparison(rows, "recall_accuracy", MEASURES, about, ["softmax"], "data.pairs").to_markdown().splitlines()
    assert "| parameters | epochs | answers, % |" in lines[0]
    assert "| 4 | 1,234 | 5 | 90.00 " in lines[3]
    assert " Holm's procedure; float32, one thread per run; " in lines[-1]
    varied = Comparison(rows, "recall_accuracy", MEASURES, about, ["softmax"], "trainer.max_epochs")
    assert "| epochs |" not in varied.to_markdown()


def test_differences_are_paired_at_the_same_value_and_leave_out_what_is_not_finite():
    assert [set(row.differences) for row in ROWS] == [set(), {"softmax"}] * 2
    assert ROWS[1].differences["softmax"].mean == pytest.approx(-8)
    assert ROWS[3].differences["softmax"].mean == pytest.approx(-43.5)
    assert (ROWS[3].differences["softmax"].count, ROWS[2].diverged) == (2, 1)
    assert ROWS[2].also["loss"].count == 2
    smaller, larger = sorted(row.differences["softmax"].p for row in ROWS[1::2])
    assert sorted(row.corrected["softmax"] for row in ROWS[1::2]) == pytest.approx(
        [2 * smaller, max(2 * smaller, larger)]
    )


def test_a_single_recipe_is_compared_with_itself_at_the_first_value():
    facts, results = FACTS[1::2], list(RESULTS.values())[1::2]
    first, second = compared(facts, results, MEASURES, ["4"])
    assert first.differences == {}
    assert second.differences["4"].mean == pytest.approx(-39)
    table = Comparison([first, second], "recall_accuracy", MEASURES, ABOUT, ["4"], "data.pairs").to_markdown()
    assert "| Δ 4 | p |" in table
    assert "| -39.00 [" in table


def test_a_comparison_is_saved_whole(tmp_path):
    page = COMPARISON.save(tmp_path)
    assert page.read_text().startswith("![answers, % over data.pairs](compared.svg)")
    assert (tmp_path / "compared.svg").is_file()
    assert len((tmp_path / "compared.csv").read_text().splitlines()) == 1 + 4 * 3


def test_a_measure_that_a_finite_run_lacks_is_named():
    with pytest.raises(ValueError, match="no measure 'wer' after its last epoch, only recall_accuracy, loss"):
        compared(FACTS, list(RESULTS.values()), {"wer": Measure("", "share")}, ["softmax"])


def test_every_recipe_has_a_line_over_the_setting_and_shares_stay_shares():
    axes = over_figure(ROWS, "data.pairs", "answers, %").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["softmax", "mala"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8"]
    low, high = axes.get_ylim()
    assert low >= -2
    assert high <= 102


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 0}, "`seeds` is 0, expected a whole number of 1 or more"),
        ({"over": "data.pairs"}, "`over` is 'data.pairs', expected key=value"),
        ({"over": "data.pairs=4,,8"}, "with different values"),
        ({"over": "data.pairs=4,8,4"}, "with different values"),
        ({"over": "seed=1,2"}, "'seed' cannot be the same for all runs"),
        ({"overrides": ["folder=elsewhere"]}, "'folder=elsewhere' cannot be the same for all runs"),
        ({"recipes": [Path("a/mala.yaml"), Path("b/mala.yaml")]}, "Two recipes are called mala"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        compare(**{"recipes": [tmp_path / "a.yaml"], "folder": tmp_path / "out", **arguments})


def test_runs_stay_in_their_folder_whatever_the_value():
    values = {"4": "4", "0.5": "0.5", "/data/text": "_data_text", "..": "_", "a/../b": "a_.._b"}
    assert {value: folder_name(value) for value in values} == values


def test_recipes_of_two_tasks_are_refused(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {name: sequence_nano}\ntask: {name: recall}\ndata: {name: recall}\n")
    second.write_text("model: {name: ravlt_nano}\ndata: {name: digits}\n")
    with pytest.raises(ValueError, match=r"different tasks \(classification, recall\)"):
        compare([first, second], tmp_path / "out")


def test_a_measure_that_the_task_does_not_have_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.studies.comparison.run_all", lambda *_: pytest.fail("trained"))
    with pytest.raises(ValueError, match=r"`also` is .wer., expected measures of the task classification: .*top1"):
        compare([write_recipe(tmp_path)], tmp_path / "out", also=["wer"])
    assert not (tmp_path / "out").exists()


@pytest.fixture
def untrained(monkeypatch):
    """Every run ends at once, with many measures."""
    result = {
        "reason": None,
        "seconds": 1.0,
        "measures": dict.fromkeys(("mask_ap", "box_ap", "fid", "loss", "top1"), 0.5),
    }
    monkeypatch.setattr("linvit.studies.comparison.run_all", lambda trainings, *_: [result] * len(trainings))


def test_recipes_that_run_code_of_others_need_trust(tmp_path, untrained):
    recipe = write_recipe(tmp_path, trainer={"callbacks": [{"class_path": "tiny_run.Dies", "init_args": {"step": 1}}]})
    with pytest.raises(ValueError, match=r"give `trust_recipe=True`"):
        compare([recipe], tmp_path / "out", seeds=1)
    assert compare([recipe], tmp_path / "out", seeds=1, trust_recipe=True).rows


@pytest.mark.parametrize(("framework", "score"), [("mask_rcnn", "mask_ap"), ("retinanet", "box_ap")])
def test_detectors_are_compared_by_what_they_predict(tmp_path, untrained, framework, score):
    recipe = write_dense_recipe(tmp_path, tiny_scenes(tmp_path / "scenes", 1, 1), framework)
    assert compare([recipe], tmp_path / "out", seeds=1).score == score


@pytest.mark.parametrize(("generates", "score"), [(True, "fid"), (False, "loss")])
def test_generators_that_do_not_sample_are_compared_by_their_loss(tmp_path, untrained, generates, score):
    recipe = write_diffusion_recipe(tmp_path, task={"generates": generates})
    assert compare([recipe], tmp_path / "out", seeds=1).score == score


def test_another_machine_goes_on_from_the_ledger_and_writes_the_page(tmp_path, capsys):
    recipe, ledger, page = write_recipe(tmp_path), tmp_path / "ledger.jsonl", tmp_path / "page.md"
    recipe.write_text(f"# A network\n# cost: a minute (estimated)\n{recipe.read_text()}")
    begin, end = marks("here")
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    arguments = ["compare", str(recipe), "--ledger", str(ledger), "--seeds", "2"]
    here = [*arguments, "--folder", str(tmp_path / "here")]
    assert main([*here, "--left"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'here'}: 0 of 2 runs are complete; 2 × a minute\n"
    assert not ledger.exists()
    assert main([*here, "--write", str(page)]) == 0
    assert page.read_text().startswith(f"above\n{begin}\n| recipe |")
    assert page.read_text().endswith(f"{end}\nbelow\n")

    first, second = ledger.read_text().splitlines(keepends=True)
    ledger.write_text(first)
    there = [*arguments, "--folder", str(tmp_path / "there")]
    row = json.loads(first)
    ledger.write_text(json.dumps(row | {"result": row["result"] | {"seconds": 720.0}}) + "\n")
    capsys.readouterr()
    assert main([*there, "--left"]) == 0
    assert capsys.readouterr().out.endswith(": 1 of 2 runs are complete; about 0.2 hours of one core left\n")
    assert main(there) == 0
    assert (
        json.loads(ledger.read_text().splitlines()[1])["result"]["measures"] == json.loads(second)["result"]["measures"]
    )
    assert [path.parent.name for path in (tmp_path / "there").rglob("result.json")] == ["seed1"]
    capsys.readouterr()
    last = [*arguments[:-1], "1", "--first-seed", "1", "--folder", str(tmp_path / "last")]
    assert main([*last, "--left"]) == 0
    assert capsys.readouterr().out.endswith(": 1 of 1 runs are complete\n")
    assert main(last) == 0
    assert "seed 1 only" in capsys.readouterr().out
    with pytest.raises(ValueError, match="with other settings: remove its line"):
        compare([recipe], tmp_path / "there", seeds=2, overrides=["optimizer.lr=1"], ledger=ledger)


def test_a_page_without_marks_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.studies.comparison.run_all", lambda *_: pytest.fail("trained"))
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"no place for the tables: add the lines <!-- out:begin -->"):
        compare([write_recipe(tmp_path)], tmp_path / "out", write=tmp_path / "page.md")

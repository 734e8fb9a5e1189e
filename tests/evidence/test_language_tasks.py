"""A comparison's language models on benchmarks: the table, the ledger that spares evaluating again, and bad input."""

import shutil

import pytest
from benchmark_files import write_benchmarks as write_files
from tiny_language import write_language_recipe

from evidence.language_tasks import BEGIN, END, to_markdown, write_benchmarks
from linvit.runs import load_run, train


def test_the_interval_is_that_of_a_share():
    of = {"accuracy": 0.36, "chance": 0.25, "items": 2304}
    measured = {"net": dict.fromkeys(("lambada_openai", "piqa", "hellaswag", "winogrande"), of)}
    lines = to_markdown(measured).splitlines()
    assert lines[2] == "| `net` |" + " 36.0 ± 2.0 |" * 4  # 1.96 · √(0.36 · 0.64 / 2304) = 0.0196
    assert lines[3:] == ["| guessing |" + " 25.0 |" * 4, "| items |" + " 2,304 |" * 4]


@pytest.mark.slow
def test_networks_are_evaluated_once(tmp_path):
    pytest.importorskip("lm_eval", reason="the extra `language` is not installed")
    recipe = write_language_recipe(tmp_path, trainer={"max_epochs": 1})
    train(recipe, {"seed": 0}, folder=tmp_path / "runs" / "tiny" / "seed0")
    data, page, ledger = write_files(tmp_path / "data"), tmp_path / "page.md", tmp_path / "ledger.jsonl"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    def write(progress):
        write_benchmarks([recipe], tmp_path / "runs", data, ledger, page, progress)
        return page.read_text()

    said = []
    text = write(said.append)
    assert len(said) == 1
    assert said[0].startswith("tiny: ")
    assert "old" not in text
    assert "| guessing | – | 50.0 | 25.0 | 50.0 |\n| items | 3 | 3 | 2 | 2 |" in text
    piqa = load_run(tmp_path / "runs" / "tiny" / "seed0").evaluate(tasks=["piqa"], task_data=data)["piqa"]
    assert f"| {100 * piqa['acc,none']:.1f} ± " in text

    shutil.rmtree(tmp_path / "runs")
    assert write(pytest.fail) == text
    ledger.unlink()
    with pytest.raises(FileNotFoundError, match="seed0"):
        write(pytest.fail)
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no place for the tables"):
        write(pytest.fail)

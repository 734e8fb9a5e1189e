import json
import math
import os
import re
import signal

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tiny_language import write_language_recipe, write_texts
from tiny_run import content, curve, differing
from torch.nn.functional import cross_entropy

from linvit.cli import main
from linvit.models.sequence import DecoderCache
from linvit.runs.evaluate import evaluate
from linvit.runs.generate import pieces, write_text
from linvit.runs.restore import restore, source_for
from linvit.runs.training import train
from linvit.studies import compare
from linvit.tasks.checkpoints import RunStoppedError


class PressesCtrlC(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(write_language_recipe(tmp_path_factory.mktemp("language")), prints=False)


def test_it_learns_and_the_best_checkpoint_is_that_of_the_fewest_bits(run):
    bits = [float(row["ema_bits_per_byte"]) for row in curve(run)]
    assert bits[-1] < bits[0] - 0.2
    best = 1 + bits.index(min(bits))
    assert content(run, "best")["global_step"] == 4 * best


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_language_recipe(tmp_path, data={"root": str(run.parent / "texts")})
    with pytest.raises(RunStoppedError):
        train(recipe, callbacks=[PressesCtrlC()], prints=False)
    assert content(tmp_path / "run")["global_step"] == 7
    train(recipe, resume=True, prints=False)
    assert differing(tmp_path / "run", run, fewest=20) == []
    assert curve(tmp_path / "run") == curve(run)


def test_eval_gives_the_bits_of_every_held_out_byte(run):
    restored = restore(run)
    measured = evaluate(restored, enable_progress_bar=False)
    network = restored.task.networks()["raw"].eval()
    nats = count = 0
    for path in sorted((run.parent / "texts" / "val").glob("*.txt")):
        count += path.stat().st_size
    source_rows = _rows(run)
    with torch.no_grad():
        for tokens, about in source_rows:
            logits = network(tokens[None], about["documents"][None])[0]
            nats += float(cross_entropy(logits.double(), about["targets"], reduction="sum"))
    assert measured["raw"]["bytes"] == count
    assert measured["raw"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / count, rel=1e-6)


def _rows(run):
    from linvit.runs.restore import source_for

    dataset = source_for(restore(run), None).val_set()
    return [dataset[index] for index in range(len(dataset))]


def test_the_trained_network_reads_and_decodes_the_same(run):
    network = restore(run).task.network.double().eval()
    tokens = torch.tensor([[256, *b"The number 3 comes before 4; its square"]])
    with torch.no_grad():
        chunked = network(tokens)
        memory = DecoderCache()
        decoded = torch.cat([network.read(token, memory) for token in tokens.split(1, 1)], 1)
        assert (network(tokens, form="matrix") - chunked).abs().max() < 1e-11
        assert (decoded - chunked).abs().max() < 1e-11


def test_generate_streams_and_repeats_itself_for_a_seed(run, capsys):
    asked = ["generate", str(run), "--prompt", "The number", "--tokens", "12", "--top-p", "0.9", "--seed", "4"]
    assert main(asked) == 0
    first = capsys.readouterr().out
    assert first.startswith("The number")
    main(asked)
    assert capsys.readouterr().out == first
    pieces = list(write_text(restore(run), "The", 5, temperature=0))
    assert pieces[0] == "The"
    assert 2 <= len(pieces) <= 7


def test_eval_of_a_folder_and_its_page(run, tmp_path, capsys):
    texts = write_texts(tmp_path / "others")
    assert main(["eval", str(run), "--data", str(texts), "--json", "--report", str(tmp_path / "page.html")]) == 0
    measured = json.loads(capsys.readouterr().out)
    total = sum(path.stat().st_size for path in texts.rglob("*.txt") if path.parent.name == "val")
    assert measured["raw"]["bytes"] == total
    page = (tmp_path / "page.html").read_text()
    assert "Cost by place in the row" in page
    assert ">Training<" in page
    rows = re.findall(r"<td[^>]*>float(?:32|64)</td>.*?</tr>", page, re.DOTALL)
    errors = [[float(error) for error in re.findall(r">(\d+e[-+]\d+|0)<", row)] for row in rows]
    assert len(errors) == 2
    assert all(len(row) == 3 and max(row) < bound for row, bound in zip(errors, (1e-5, 1e-13), strict=True))
    assert "<pre>" in page


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["predict", "RUN", "picture.png"], "reads tokens, not images"),
        (["generate", "RUN", "--tokens", "0"], "--tokens is 0"),
        (["generate", "RUN", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "RUN", "--temperature", "nan"], "temperature is nan"),
        (["generate", "RUN", "--top-p", "2", "--prompt", "The"], "top-p is 2.0"),
        (["generate", "RUN", "--seed", "9" * 30], "--seed is 999"),
        (["generate", "RUN", "--output", "picture.png"], "--output is of images"),
        (["eval", "RUN", "--data", "nowhere"], "nowhere does not exist"),
        (["eval", "RUN", "--limit", "3"], "--include and --limit are of --tasks, which is not given"),
        (["eval", "RUN", "--tasks", "piqa", "--data", "stdlib"], "leave --data and --report out"),
    ],
)
def test_wrong_use_ends_in_a_sentence(run, command, message, capsys):
    assert main([str(run) if part == "RUN" else part for part in command]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert message in said
    assert "Traceback" not in said


def test_bytes_of_the_shell_that_are_no_utf8_are_read_and_shown(run):
    assert next(write_text(restore(run), "caf\udce9", 3)) == "caf\ufffd"


class Words:
    longest = 0

    def decode(self, tokens):
        self.longest = max(self.longest, len(tokens))
        return " ".join(map(str, tokens))


class Halves:
    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", "replace")


def test_a_piece_is_decoded_with_the_one_before_and_characters_come_whole():
    words = Words()
    assert "".join(pieces(words, iter(range(50)))) == " ".join(map(str, range(50)))
    assert words.longest == 2
    assert [piece for piece in pieces(Halves(), iter("é煙x".encode())) if piece] == ["é", "煙", "x"]
    assert "".join(pieces(Halves(), iter("é煙".encode()[:-1]))) == "é\ufffd"


def test_a_folder_is_read_as_the_run_s_own_text(tmp_path):
    recipe = write_language_recipe(tmp_path, trainer={"max_epochs": 1}, data={"keeps_apart": False})
    for text in list((tmp_path / "texts").rglob("*.txt")):
        text.rename(text.with_suffix(".md"))
    folder = train(recipe, ["data.suffixes=[.md]"], prints=False)
    source = source_for(restore(folder), str(tmp_path / "texts"))
    assert not source.keeps_apart
    assert {path.suffix for path in source.files["val"]} == {".md"}


def test_a_byte_recipe_names_its_decoder(tmp_path):
    recipe = write_language_recipe(tmp_path, model={"name": "sequence_mini"})
    with pytest.raises(ValueError, match="did you mean 'sequence_nano'"):
        train(recipe, prints=False)


def test_recipes_are_compared_over_seeds_and_what_is_complete_is_not_trained_again(tmp_path):
    recipes = []
    for mechanism in ("linear", "mala"):
        (tmp_path / mechanism).mkdir()
        path = write_language_recipe(
            tmp_path / mechanism, mechanism, task={"ema_decay": None}, trainer={"max_epochs": 1}
        )
        recipes.append(path.rename(tmp_path / f"{mechanism}.yaml"))
    asked = {"seeds": 2, "over": "data.batch_size=2", "overrides": ["data.context=16", "trainer.limit_train_batches=1"]}
    text = compare(recipes, tmp_path / "out", **asked).to_markdown()
    assert text.count("| `linear` | 2 |") == text.count("| `mala` | 2 |") == 1
    assert "bits per byte" in text
    found = json.loads((tmp_path / "out" / "compared.json").read_text())["rows"]
    assert len({row["parameters"] for row in found}) == 1
    assert all(5 < measure < 9 for row in found for measure in row["measures"])
    means = [sum(row["measures"]) / 2 for row in found]
    assert found[1]["differences"]["linear"]["mean"] == pytest.approx(means[1] - means[0])
    assert (tmp_path / "out" / "compared.svg").is_file()
    before = (tmp_path / "out" / "compared.json").read_text()
    compare(recipes, tmp_path / "out", **asked)
    assert (tmp_path / "out" / "compared.json").read_text() == before
    page = compare(recipes, tmp_path / "out", **asked, also=["next_accuracy"]).to_markdown()
    assert "| p | next token, % | s per run |" in page
    rows = json.loads((tmp_path / "out" / "compared.json").read_text())["rows"]
    assert [row["also"]["next_accuracy"]["count"] for row in rows] == [2, 2]
    with pytest.raises(ValueError, match=r"`also` is 'top1', expected measures of the task language: .*perplexity"):
        compare(recipes, tmp_path / "out", **asked, also=["top1"])


def test_models_lists_decoders_with_what_they_keep(capsys):
    assert main(["models", "--sequence", "--json"]) == 0
    rows = {(row["name"], row["mechanism"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["sequence_340m", "mala"]["parameters"] == rows["sequence_340m", "softmax"]["parameters"] == 341_394_432
    assert rows["sequence_340m", "mala"]["memory"] < rows["sequence_340m", "softmax"]["memory"] / 50

import json
import math
import re

import pytest
import torch
from tiny_language import write_language_recipe, write_texts
from tiny_run import check_resumes_bit_for_bit, content, curve
from torch.nn.functional import cross_entropy

from linvit.runs import load_run, train
from linvit.runs.tasks.language import pieces
from linvit.runs.training import train_folder
from linvit.studies import compare
from linvit_cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_folder(write_language_recipe(tmp_path_factory.mktemp("language")))


def test_it_learns_and_the_best_checkpoint_is_that_of_the_fewest_bits(run):
    bits = [float(row["ema_bits_per_byte"]) for row in curve(run)]
    assert bits[-1] < bits[0] - 0.2
    best = 1 + bits.index(min(bits))
    assert content(run, "best")["global_step"] == 4 * best


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_language_recipe(tmp_path, data={"root": str(run.parent / "texts")})
    check_resumes_bit_for_bit(recipe, run, step=6, fewest=20)


def test_the_bits_are_those_of_every_held_out_byte(run):
    loaded = load_run(run)
    measures = loaded.evaluate().by_weights["raw"]
    network = loaded.task.networks()["raw"].eval()
    count = sum(path.stat().st_size for path in (run.parent / "texts" / "val").glob("*.txt"))
    rows = loaded.source().val_set()
    nats = 0.0
    with torch.no_grad():
        for tokens, about in (rows[index] for index in range(len(rows))):
            logits = network(tokens[None], about["documents"][None])[0]
            nats += float(cross_entropy(logits.double(), about["targets"], reduction="sum"))
    assert measures["bytes"] == count
    assert measures["bits_per_byte"] == pytest.approx(nats / math.log(2) / count, rel=1e-6)


def test_generate_streams_and_repeats_itself_for_a_seed(run, capsys):
    asked = ["generate", str(run), "--prompt", "The number", "--tokens", "12", "--top-p", "0.9", "--seed", "4"]
    assert main(asked) == 0
    first = capsys.readouterr().out
    assert first.startswith("The number")
    main(asked)
    assert capsys.readouterr().out == first
    texts = list(load_run(run).generate(prompt="The", tokens=5, temperature=0))
    assert texts[0] == "The"
    assert 2 <= len(texts) <= 7


@pytest.mark.slow
def test_another_folder_and_its_report(run, tmp_path):
    texts = write_texts(tmp_path / "others")
    loaded = load_run(run)
    measures = loaded.evaluate(texts)
    total = sum(path.stat().st_size for path in texts.rglob("*.txt") if path.parent.name == "val")
    assert measures["bytes"] == total
    page = loaded.report(tmp_path / "page.html", measures, texts).read_text()
    assert "Bits per token by position" in page
    assert ">Training<" in page
    rows = re.findall(r"<td[^>]*>float(?:32|64)</td>.*?</tr>", page, re.DOTALL)
    errors = [[float(error) for error in re.findall(r">(\d+e[-+]\d+|0)<", row)] for row in rows]
    assert len(errors) == 2
    assert all(len(row) == 3 and max(row) < bound for row, bound in zip(errors, (1e-5, 1e-13), strict=True))
    assert "<pre>" in page


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seed": -1}, "`seed` is -1, expected a whole number from 0"),
        ({"prompt": "a\ud800"}, r"`prompt` has '\\ud800', half of a surrogate pair"),
    ],
)
def test_what_cannot_be_generated_is_said_at_the_call(run, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_run(run).generate(**options)


def test_bytes_of_the_shell_that_are_no_utf8_are_read_and_shown(run):
    assert next(load_run(run).generate(prompt="caf\udce9", tokens=3)) == "caf\ufffd"


def test_the_space_between_prompt_and_generated_text_is_kept():
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `language` is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0, "▁cat": 1, "▁sat": 2, "</s>": 3}))
    words.decoder = tokenizers.decoders.Metaspace()

    class Spaced:
        decode = staticmethod(words.decode)

    assert "".join(pieces(Spaced(), iter([2, 0]), [0, 1])) == " sat the"
    assert "".join(pieces(Spaced(), iter([0, 1]))) == "the cat"


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
    source = train(recipe, ["data.suffixes=[.md]"]).source(tmp_path / "texts")
    assert not source.keeps_apart
    assert {path.suffix for path in source.files["val"]} == {".md"}


@pytest.mark.slow
def test_recipes_are_compared_over_seeds_and_what_is_complete_is_not_trained_again(tmp_path):
    recipes = []
    for mechanism in ("linear", "mala"):
        path = write_language_recipe(
            tmp_path / mechanism, mechanism, task={"ema_decay": None}, trainer={"max_epochs": 1}
        )
        recipes.append(path.rename(tmp_path / f"{mechanism}.yaml"))
    asked = {"seeds": 2, "over": "data.batch_size=2", "overrides": ["data.context=16", "trainer.limit_train_batches=1"]}
    text = compare(recipes, tmp_path / "out", **asked).to_markdown()
    assert text.count("| `linear` | 2 |") == text.count("| `mala` | 2 |") == 1
    assert "bits per byte" in text
    rows = json.loads((tmp_path / "out" / "compared.json").read_text())["rows"]
    assert len({row["parameters"] for row in rows}) == 1
    assert all(5 < measure < 9 for row in rows for measure in row["measures"])
    means = [sum(row["measures"]) / 2 for row in rows]
    assert rows[1]["differences"]["linear"]["mean"] == pytest.approx(means[1] - means[0])
    assert (tmp_path / "out" / "compared.svg").is_file()
    before = (tmp_path / "out" / "compared.json").read_text()
    compare(recipes, tmp_path / "out", **asked)
    assert (tmp_path / "out" / "compared.json").read_text() == before
    page = compare(recipes, tmp_path / "out", **asked, also=["next_accuracy"]).to_markdown()
    assert "| p | next-token accuracy, % | s per run |" in page
    rows = json.loads((tmp_path / "out" / "compared.json").read_text())["rows"]
    assert [row["also"]["next_accuracy"]["count"] for row in rows] == [2, 2]

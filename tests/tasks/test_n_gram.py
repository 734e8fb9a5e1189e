import math

import pytest
import torch

from linvit.tasks.transcription import CountedNGram, NGram, prefix_beam

ARPA = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.0\t<unk>\t0
-99\t<s>\t-0.3
-1.0\t</s>\t0
-0.7\tA\t-0.2
-0.9\tB\t-0.1

\\2-grams:
-0.2\t<s> A
-0.1\tA B
-1.5\tB B

\\end\\
"""


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("kenlm", reason="kenlm is not installed")
    path = tmp_path / "model.arpa"
    path.write_text(ARPA)
    return NGram(path)


def test_scores_are_those_of_the_file(model):
    ten = math.log(10)
    assert model((), "A") == pytest.approx(-0.2 * ten)
    assert model((), "B") == pytest.approx((-0.3 - 0.9) * ten)  # no such pair: back to the word alone
    assert model(("A",), "B") == pytest.approx(-0.1 * ten)
    assert model(("A", "B"), "B") == pytest.approx(-1.5 * ten)
    assert model(("B", "A"), "A") == pytest.approx((-0.2 - 0.7) * ten)


def test_it_turns_what_the_beam_finds(model):
    names = ["<blank>", "▁A", "▁B"]
    logits = torch.tensor([[0.1, 0.35, 0.55], [0.9, 0.05, 0.05], [0.1, 0.4, 0.5]]).log()
    assert prefix_beam(logits, 8, names) == [2, 2]
    assert prefix_beam(logits, 8, names, model, weight=0.5) == [1, 2]


def test_what_is_no_language_model_is_named(tmp_path):
    pytest.importorskip("kenlm", reason="kenlm is not installed")
    with pytest.raises(ValueError, match="is missing or no language model"):
        NGram(tmp_path / "nowhere.arpa")
    (tmp_path / "bad.arpa").write_text("no model")
    with pytest.raises(ValueError, match=r"bad\.arpa is missing or no language model"):
        NGram(tmp_path / "bad.arpa")


def test_counted_probabilities_are_the_formula():
    model = CountedNGram(["A B", "A B", "A C"], order=2)  # 3 A, 2 B, 1 C, 3 ends; one more for unknown words
    alone = {"A": (3 + 4 / 5) / 13, "B": (2 + 4 / 5) / 13, "Z": (4 / 5) / 13}
    assert model((), "A") == pytest.approx(math.log((3 + alone["A"]) / 4))
    assert model(("A",), "B") == pytest.approx(math.log((2 + 2 * alone["B"]) / 5))
    assert model(("C", "A"), "Z") == pytest.approx(math.log(2 * alone["Z"] / 5))
    assert model(("Z",), "B") == pytest.approx(math.log(alone["B"]))  # an unknown word says nothing of the next


@pytest.mark.parametrize("before", [(), ("A",), ("A", "B"), ("Z", "A"), ("C", "C", "C")])
def test_counted_probabilities_sum_to_one(before):
    model = CountedNGram(["A B A", "B", "", "C A B B"])
    assert sum(math.exp(model(before, word)) for word in ("A", "B", "C", "</s>", "unknown")) == pytest.approx(1)

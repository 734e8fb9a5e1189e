"""A tiny BERT made linear, on books of made words: the measure, the stages, the ledger and the tables."""

import random

import pytest
import torch

import linvit
from evidence import minilm, minilm_page, passages
from evidence.minilm import Runs, Stage, Student, Study
from evidence.passages import Passages, chosen_books, embeddings, finds_neighbour, measures, passages_of, pieces_of
from linvit.analysis.markdown import marks

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

WORDS = [f"w{number}" for number in range(40)]
STAGES = {"align": Stage(6, 2, 16, 1e-2, 0), "short": Stage(3, 4, 8, 1e-3, 1), "long": Stage(3, 2, 16, 1e-3, 2)}


def tokenizer():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return transformers.BertTokenizer(vocab={word: number for number, word in enumerate([*special, *WORDS])})


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Two books of each of five authors; sizes and parts as small."""
    monkeypatch.setattr(passages, "BYTES", (300, 10_000))
    for name in ("HELD_OUT", "DEVELOPMENT"):
        monkeypatch.setattr(minilm, name, 1)
    monkeypatch.setattr(minilm, "LEARNED", 3)
    drawn = random.Random(0)
    for author in "abcde":
        for book in "xy":
            lines = [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 9))) for _ in range(30)]
            path = tmp_path / "books" / author / f"{book}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# Title: none\n\n" + "\n\n".join(lines))
    (tmp_path / "books" / "a" / "short.md").write_text("w0")
    return tmp_path / "books"


@pytest.fixture
def encoder(tmp_path):
    """A BERT of two blocks with random weights, large ones, so that its attention is far from uniform."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.BertConfig(
        **small, vocab_size=len(WORDS) + 5, max_position_embeddings=16, initializer_range=0.5
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_a_passage_is_found_by_a_neighbour_of_its_own_book():
    books = torch.tensor([0, 0, 0, 1, 1])
    angles = torch.tensor([0.0, 0.1, 1.0, 1.05, 3.0])  # 0 and 1 find each other; 2 and 3 too, but in different books
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert finds_neighbour(vectors, books).tolist() == [True, True, False, False, True]
    same = measures(vectors, vectors, books)
    assert (same["top1"], same["kept"], same["low"], same["agreement"], same["error"]) == (0.6, 1, 1, 1, 0)
    turned = vectors[[1, 0, 2, 4, 3]]
    assert measures(turned, vectors, books)["agreement"] < 1


def test_books_are_chosen_by_a_rule_and_one_of_each_author(books):
    chosen = chosen_books(books, 5)
    assert sorted(path.parent.name for path in chosen) == [*"abcde"]
    assert chosen == chosen_books(books, 5)
    assert chosen[:3] == chosen_books(books, 3)
    with pytest.raises(ValueError, match="has books of 5 authors, expected 6 or more: give the folder"):
        chosen_books(books, 6)


def test_passages_are_whole_paragraphs_in_turn(books):
    own, paths = tokenizer(), chosen_books(books, 2)
    cut = passages_of(paths, own, 16, None)
    assert cut.ids.shape[1] == 16
    assert passages_of(paths, own, 16, 2).ids.equal(torch.cat([cut.ids[cut.books == book][:2] for book in (0, 1)]))
    texts = [passages.paragraphs(path) for path in paths]
    for book, text in enumerate(texts):
        read = own.batch_decode(cut.ids[cut.books == book], skip_special_tokens=True)
        assert " ".join(text).startswith(" ".join(read))
        ends = [len(" ".join(text[:count]).split()) for count in range(1, len(text) + 1)]
        assert len(" ".join(read).split()) in ends
    pieces = pieces_of(paths, own, 16)
    assert (pieces[:, 0] == own.cls_token_id).all()
    assert (pieces[:, -1] == own.sep_token_id).all()
    assert " ".join(texts[0]).startswith(" ".join(own.batch_decode(pieces[:2, 1:-1])))


@pytest.mark.slow
def test_padding_is_not_in_an_embedding(encoder):
    model = linvit.swap_attention(transformers.AutoModel.from_pretrained(encoder), "mala").eval()
    ids = torch.tensor([[2, 7, 9, 8, 3], [2, 7, 3, 0, 0]])
    together = embeddings(model, Passages(ids, torch.zeros(2)))
    alone = embeddings(model, Passages(ids[1:, :3], torch.zeros(1)))
    torch.testing.assert_close(together[1:], alone)


@pytest.mark.slow
def test_stages_run_once_and_their_rows_make_the_tables(encoder, books, tmp_path, monkeypatch):
    students = (
        Student("mala", "mala"),
        Student("mala_hybrid", "mala", "plan", stages=("align", "short")),
        Student("mala_new", "mala", new=True, stages=("long",)),
    )
    monkeypatch.setattr(minilm, "STUDENTS", students)
    monkeypatch.setattr(minilm, "SOFTMAX", 1)
    study, folder, ledger = Study(16, 10, 5, **STAGES), tmp_path / "runs", tmp_path / "ledger.jsonl"
    said = []
    runs = Runs(encoder, books, folder, ledger, study)
    runs.run(said.append)
    assert len(said) == 8  # four stages, a plan, two stages, one
    losses = runs.ledger._rows["mala align"]["result"]["losses"]
    assert losses[-1] < losses[0]
    first = torch.load(folder / "mala_copied.pt")
    aligned, trained = (torch.load(folder / f"mala_{stage}.pt") for stage in ("align", "short"))
    changed = {name for name in first if not first[name].equal(aligned[name])}
    assert changed
    assert all(".attention.self." in name for name in changed)
    assert {name for name in first if not aligned[name].equal(trained[name])} > changed
    assert sorted(runs.ledger._rows["mala_hybrid short"]["result"]["pattern"]) == ["L", "S"]
    Runs(encoder, books, folder, ledger, study).run(pytest.fail)

    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"{begin}\n{end}\n" for begin, end in map(marks, ("minilm", "minilm_plan", "minilm_times")))
    )
    minilm_page.write_results(page, ledger)
    monkeypatch.setattr(minilm_page, "LENGTHS", (16, 40))
    minilm_page.write_times(encoder, page)
    text = page.read_text()
    assert "| `mala` | L | not aligned | 0 |" in text
    assert f"| `mala` | L | aligned | {6 * 2 * 16:,} |" in text
    assert f"| `mala` | L | and distilled, long | {6 * 2 * 16 + 3 * 4 * 8 + 3 * 2 * 16:,} |" in text
    assert "| mechanism | block 1 | block 2 |" in text
    assert "| 40 |" in text

"""A recognizer of text with random weights and few classes, made linear, on lines of made words."""

import os
from itertools import chain
from pathlib import Path

import pytest
import torch

from evidence import ocr, ocr_page, passages, text_recognizer
from evidence.ocr import Features, Runs, Sample, Stage, Student, Study
from evidence.ocr_equality import equality
from evidence.rows import ROOT, Call
from evidence.text_lines import HELD_OUT_FONTS, SEEN_FONTS, Line, by_width, lines_of, normalized, render
from evidence.text_recognizer import Recognizer, decode, linearized, load_recognizer
from linvit.analysis.markdown import marks

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
FILE = Path(os.environ.get("RECOGNIZER", ROOT / Call.recognizer))
LETTERS = "ab,.'"


@pytest.fixture
def recognizer(monkeypatch):
    """Random weights, so large that attention is far from uniform, and an empty class, the letters and a space."""
    monkeypatch.setattr(text_recognizer, "CLASSES", len(LETTERS) + 2)
    torch.manual_seed(0)
    network = Recognizer().eval()
    for block in network.reader.blocks:
        block.attn.qkv.weight.data *= 6
    return network


@pytest.fixture
def file(recognizer, tmp_path):
    """An ONNX file whose nodes read these weights in turn, as in the real one, among constants that are none."""
    weights = {name: x for name, x in recognizer.state_dict().items() if not name.endswith("num_batches_tracked")}
    constants = {f"layer_{number}.w_0": x for number, x in enumerate(weights.values())} | {"p2o.six": torch.ones(1)}
    nodes = [
        onnx.helper.make_node(
            "Constant",
            [],
            [name],
            value=onnx.numpy_helper.from_array((x.mT if x.ndim == 2 else x).contiguous().numpy()),
        )
        for name, x in reversed(constants.items())
    ]
    nodes += [onnx.helper.make_node("Identity", [name], [f"{name}_read"]) for name in constants]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "recognizer", [], []))
    onnx.helper.set_model_props(model, {"character": "\n".join(LETTERS)})
    onnx.save(model, tmp_path / "recognizer.onnx")
    return tmp_path / "recognizer.onnx"


@pytest.fixture
def books(tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "BYTES", (100, 10_000))
    for author in "uvw":
        path = tmp_path / "books" / author / "book.md"
        path.parent.mkdir(parents=True)
        path.write_text("# Title\n\n" + " ".join(f"{'ab' * (i % 3 + 1)}a, a’b — ba." for i in range(40)))
    return tmp_path / "books"


def test_widths_become_an_eighth_as_many_tokens(recognizer):
    for width in (32, 72, 136):
        assert recognizer(torch.randn(2, 3, 48, width)).shape == (2, width // 8, len(LETTERS) + 2)


def test_weights_are_read_from_an_onnx_file_in_the_order_of_its_nodes(recognizer, file, monkeypatch):
    loaded, characters = load_recognizer(file)
    assert characters == ["", *LETTERS, " "]
    images = torch.randn(1, 3, 48, 64)
    assert loaded(images).equal(recognizer(images))
    monkeypatch.setattr(text_recognizer, "CLASSES", 3)
    with pytest.raises(ValueError, match="is not the recognizer: give ch_PP-OCRv4_rec_infer"):
        load_recognizer(file)


@pytest.mark.skipif(not FILE.exists(), reason=f"{FILE.name} is not here: its path can be in RECOGNIZER")
def test_the_network_equals_onnxruntime():
    network, characters = load_recognizer(FILE)
    lines = [Line("It was the best of times, it was"[:end], 0, HELD_OUT_FONTS[0], 1) for end in (9, 17, 32)]
    assert len({image.shape[-1] for _, image in by_width(lines).values()}) == 3
    result = equality(network, FILE, lines, characters)
    assert (result["lines"], result["same"], result["exact_lines"]) == (3, 3, 1)
    assert result["exact"][1] < 1e-5
    assert result["ours"][0] < 3 * result["theirs"][0] + 1e-5  # rounding in float32
    texts = ocr.texts_of(network.reader, ocr.features_of(network, lines), characters)
    assert texts == [line.text for line in lines]


def test_decoding_merges_repetitions_and_leaves_blanks_out():
    assert decode(torch.tensor([[0, 1, 1, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0, 3]]), ["", *"ab", " "]) == ["aab ", " "]


@pytest.mark.parametrize("mechanism", ocr.MECHANISMS)
def test_linear_attention_is_the_formula(recognizer, mechanism):
    """With the features κ(x) = elu(x) + 1: the scores of all heads, written out."""
    attention = linearized(recognizer.reader, mechanism).blocks[1].attn.double()
    x = torch.randn(2, 7, 120, dtype=torch.double)
    query, key, value = attention.qkv(x).view(2, 7, 3, 8, 15).permute(2, 0, 3, 1, 4)
    query, key = (torch.nn.functional.elu(features) + 1 for features in (query, key))
    scores, scale = query @ key.mT, 15**-0.5
    if mechanism == "linear":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-6 * 7)
    elif mechanism == "mala":
        mass = scale * scores.mean(-1, keepdim=True)
        scores = (scale * scores * (1 + 1 / (mass + 1e-6)) - mass) / 7
    else:
        weights = (scale * query.mean(2, keepdim=True) @ key.mT).softmax(-1)
        scores = weights * scores / ((weights * scores).sum(-1, keepdim=True) + 1e-6)
    expected = attention.proj((scores @ value).transpose(1, 2).reshape(2, 7, 120))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-10)


def test_students_start_from_the_teachers_projections(recognizer):
    reader, x = recognizer.reader, torch.randn(1, 480, 1, 9)
    mixed = linearized(reader, "mala", "SL", local=3)
    assert [block.attn.mechanism for block in mixed.blocks] == ["softmax", "mala"]
    assert mixed.blocks[1].attn.qkv.weight.equal(reader.blocks[1].attn.qkv.weight)
    assert mixed(x).equal(linearized(reader, "mala", "SL")(x))
    torch.nn.init.ones_(mixed.blocks[1].attn.local.weight)
    assert not mixed(x).allclose(linearized(reader, "mala", "SL")(x))
    assert ocr.attention_error(linearized(reader, "mala"), reader, x) > 0


def test_lines_are_the_same_for_the_same_seed(books):
    paths = passages.chosen_books(books, 2)
    lines = lines_of(paths, 5, SEEN_FONTS, 3)
    assert lines == lines_of(paths, 5, SEEN_FONTS, 3)
    assert lines != lines_of(paths, 5, SEEN_FONTS, 4)
    assert [line.book for line in lines] == [0] * 5 + [1] * 5
    assert all(8 <= len(line.text) <= 40 and set(line.text) <= {*LETTERS, " "} for line in lines)
    image = render(lines[0])
    assert (image == render(lines[0])).all()
    assert image.shape[0] == 48
    assert image.shape[1] % 32 == 0
    groups = by_width(lines)
    assert sorted(torch.cat([places for places, _ in groups.values()]).tolist()) == [*range(10)]
    pixels = normalized(torch.tensor([[[0, 255]]], dtype=torch.uint8))
    assert pixels.tolist() == [[[[-1.0, 1.0]]] * 3]


def test_lost_points_are_paired_with_the_teacher():
    lines = [Line(text, book, "", 0) for book in (0, 1) for text in ("a b", "ab")]
    result = ocr.measures(["ab", "ab", "a b", "x"], ["a b", "ab", "y", "ab"], lines)
    assert (result["exact"], result["teacher"], result["lost"], result["same"]) == (0.5, 0.75, 0.25, 0.25)
    assert (result["joined_exact"], result["joined_lost"]) == (0.75, 0)
    assert result["low"] == 0
    assert result["high"] == 0.5


def test_batches_have_each_line_once():
    groups = {
        8: (torch.tensor([0, 2, 4]), torch.tensor([0.0, 2, 4])),
        16: (torch.tensor([1, 3]), torch.tensor([1.0, 3])),
    }
    features = Features([Line("", 0, "", 0)] * 5, groups)
    assert [x.tolist() for _, x in features.batches(2)] == [[0, 2], [4], [1, 3]]
    draws = [x.tolist() for x in features.draws(2, 6, 0)]
    for epoch in (draws[:3], draws[3:]):
        assert sorted(chain(*epoch)) == [0, 1, 2, 3, 4]
    assert draws == [x.tolist() for x in features.draws(2, 6, 0)]


@pytest.mark.slow
def test_stages_run_once_and_their_rows_make_the_page(file, books, tmp_path, monkeypatch):
    samples = {name: Sample(1, 6, SEEN_FONTS[:1], seed) for seed, name in enumerate(ocr.SAMPLES)}
    students = (Student("mala_local", "mala", local=3), Student("linear_new", "linear", new=True, stages=("whole",)))
    monkeypatch.setattr(ocr, "SAMPLES", samples)
    monkeypatch.setattr(ocr, "STUDENTS", students)
    monkeypatch.setattr(
        ocr,
        "equality",
        lambda *_: {"lines": 1, "same": 1, "exact_lines": 1, "exact": [0, 0], "ours": [0, 0], "theirs": [0, 0]},
    )
    study, ledger = Study(*[Stage(8, 2, (1e-3, 1e-2), batch=2)] * 3), tmp_path / "ledger.jsonl"
    said: list[str] = []
    runs = Runs(file, books, tmp_path / "runs", ledger, study)
    runs.run(said.append)
    assert len(said) == 5  # the teacher, three stages, one
    result = runs.ledger._rows["mala_local align"]["result"]
    assert result["curve"][-1][3] < result["curve"][0][3]
    copied, aligned, distilled = (
        torch.load(tmp_path / "runs" / f"mala_local_{stage}.pt") for stage in ("copied", "align", "distill")
    )
    changed = {name for name in copied if not copied[name].equal(aligned[name])}
    assert changed
    assert all(".attn." in name for name in changed)
    changed = {name for name in copied if not aligned[name].equal(distilled[name])}
    assert {"norm.weight", "blocks.0.attn.local.weight", "join.1.0.weight"} <= changed
    assert not any(name.startswith("head.") or "running" in name for name in changed)
    Runs(file, books, tmp_path / "runs", ledger, study).run(pytest.fail)

    page = tmp_path / "page.md"
    page.write_text("".join(f"{begin}\n{end}\n" for begin, end in map(marks, ("ocr", "ocr_times"))))
    ocr_page.write_results(page, ledger)
    monkeypatch.setattr(ocr_page, "WIDTHS", (64, 96))
    ocr_page.write_times(file, page)
    text = page.read_text()
    assert "| `mala_local` | LL | not aligned | 0 |" in text
    assert f"| `mala_local` | LL | and distilled | {result['lines'] * 2} |" in text
    assert "| `linear_new` | LL | distilled |" in text
    assert "| 96 |" in text
    assert (tmp_path / "ocr.svg").exists()

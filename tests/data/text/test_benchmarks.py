import bz2

import pytest
from benchmark_files import (
    HELLASWAG,
    LAMBADA,
    PIQA,
    PIQA_LABELS,
    WINOGRANDE,
    write_arrow,
    write_benchmarks,
    write_hellaswag_text,
    write_json_lines,
)

from linvit.data.text.benchmarks import BENCHMARKS, read_benchmark

pytest.importorskip("datasets", reason="the extra `language` is not installed")
ROWS = {
    "lambada_openai": LAMBADA,
    "lambada_standard": LAMBADA,
    "piqa": [row | {"label": label} for row, label in zip(PIQA, PIQA_LABELS, strict=True)],
    "hellaswag": HELLASWAG,
    "winogrande": WINOGRANDE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.mark.parametrize("task", BENCHMARKS)
def test_the_published_formats_are_read(task, folder):
    assert read_benchmark(task, folder) == ROWS[task]


@pytest.mark.parametrize("task", ["piqa", "hellaswag", "winogrande"])
@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_json_lines_and_arrow_have_the_same_rows(task, form, tmp_path):
    rows = [row | {"id": number} for number, row in enumerate(ROWS[task])]
    if form == "arrow":
        write_arrow(tmp_path / task, rows)
    else:
        write_json_lines(tmp_path / task / "dev.jsonl", rows)
    assert read_benchmark(task, tmp_path) == ROWS[task]


def test_labels_that_are_text_and_plain_text_without_packing(tmp_path):
    write_json_lines(tmp_path / "hellaswag_val.jsonl", [HELLASWAG[0] | {"label": "3"}])
    assert read_benchmark("hellaswag", tmp_path)[0]["label"] == 3
    write_hellaswag_text(tmp_path / "text" / "hellaswag_val.txt")
    assert read_benchmark("hellaswag", tmp_path / "text") == HELLASWAG


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa/tests.jsonl", b"{}\n", "has 0 files for the task piqa, expected one whose path names piqa"),
        ("piqa/valid.jsonl", b"{\n", r"valid.jsonl, line 1, is not JSON"),
        ("piqa/valid.jsonl", b"\n", r"valid.jsonl has no items of piqa"),
        ("piqa/valid.jsonl", b"3\n", r"valid.jsonl, item 1, is 3, expected an object"),
        ("piqa/valid.jsonl", b'{"goal": "a", "sol1": "b", "label": 0}\n', "item 1, has null as 'sol2', expected text"),
        ("piqa/valid.arrow", b"no table", "valid.arrow cannot be read as Arrow"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_benchmark("piqa", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hellaswag_val.txt", b"a: b\n1\n", "has 2 lines, expected 6 per item"),
        ("hellaswag_val.txt.bz2", bz2.compress(b"a: b")[:-4], "cannot be read as text"),
        ("hellaswag_val.txt", b"a: b\n4\nc\nd\ne\nf\n", "item 1, has 4 as 'label'"),
    ],
)
def test_damaged_text_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_benchmark("hellaswag", tmp_path)


def test_columns_that_a_task_would_stumble_on(tmp_path):
    write_json_lines(tmp_path / "winogrande" / "dev.jsonl", [WINOGRANDE[0], WINOGRANDE[1] | {"sentence": "No gap."}])
    with pytest.raises(ValueError, match=r"item 2, has 'No gap.' as 'sentence', expected a sentence with a gap"):
        read_benchmark("winogrande", tmp_path)
    write_json_lines(tmp_path / "lambada_test.jsonl", [{"text": "one"}])
    with pytest.raises(ValueError, match="item 1, has 'one' as 'text', expected several words"):
        read_benchmark("lambada_openai", tmp_path)


def test_labels_of_another_length_two_files_and_no_folder(folder, tmp_path):
    write_json_lines(tmp_path / "piqa" / "valid.jsonl", PIQA)
    (tmp_path / "piqa" / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(ValueError, match="has 2 labels for 3 items"):
        read_benchmark("piqa", tmp_path)
    write_arrow(tmp_path / "piqa", ROWS["piqa"])
    with pytest.raises(ValueError, match=r"has 2 files for the task piqa \(piqa/valid.jsonl, piqa/validation/"):
        read_benchmark("piqa", tmp_path)
    with pytest.raises(ValueError, match=r"`task_data` is .*nowhere, expected a folder"):
        read_benchmark("piqa", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"`task` is 'piqua', expected one of .* Did you mean 'piqa'"):
        read_benchmark("piqua", folder)

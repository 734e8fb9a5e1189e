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
        ("piqa/valid.jsonl", b'{"goal": "a", "sol1": "b", "label": 0}\n', "item 1, has no 'sol2': correct it"),
        ("piqa/valid.arrow", b"no table", "valid.arrow cannot be read as Arrow"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_benchmark("piqa", tmp_path)


def test_labels_of_another_length_two_files_and_no_folder(folder, tmp_path):
    write_json_lines(tmp_path / "piqa" / "valid.jsonl", PIQA)
    (tmp_path / "piqa" / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(ValueError, match="has 2 labels for 3 items"):
        read_benchmark("piqa", tmp_path)
    write_arrow(tmp_path / "piqa", ROWS["piqa"])
    with pytest.raises(ValueError, match=r"has 2 files for the task piqa \(piqa/valid.jsonl, piqa/validation/"):
        read_benchmark("piqa", tmp_path)

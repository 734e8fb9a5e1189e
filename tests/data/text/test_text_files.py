import os
import re
from itertools import pairwise

import numpy as np
import pytest

from linvit.data.text import Stdlib, TextFolder
from linvit.data.text.files import NOT_READ


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        (tmp_path / f"part{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 3}" / f"{number}.txt").write_text(f"text {number} " * 9)
    (tmp_path / "notes.rst").write_text("no text")
    return tmp_path


def test_the_standard_library_is_read_without_tests_and_never_on_both_sides():
    source = Stdlib(held_out=0.03)
    train, val = ({path.name for path in source.files[part]} for part in ("train", "val"))
    paths = [path for files in source.files.values() for path in files]
    assert len(paths) == len(set(paths)) > 400
    assert {"argparse.py", "_pydecimal.py"} <= train | val
    assert not any(NOT_READ & set(path.parts) for path in paths)
    assert not set(source.files["train"]) & set(source.files["val"])
    assert re.match(
        r"the standard library of Python 3\.\d+\.\d+: \d+ files of [\d,]+ bytes", source.preprocessing.corpus
    )
    assert source.num_classes == 257


def test_files_are_divided_by_their_names_wherever_they_are(folder, tmp_path_factory):
    source = TextFolder(str(folder), held_out=0.3)
    names = {part: [path.relative_to(folder) for path in files] for part, files in source.files.items()}
    assert 4 <= len(names["val"]) <= 20
    assert len(names["train"]) + len(names["val"]) == 40
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in [*names["train"], *names["val"]]:
        (elsewhere / path).parent.mkdir(exist_ok=True)
        (elsewhere / path).write_bytes((folder / path).read_bytes())
    again = TextFolder(str(elsewhere), held_out=0.3)
    assert [path.relative_to(elsewhere) for path in again.files["val"]] == names["val"]


def test_a_val_folder_is_what_is_held_out(folder):
    (folder / "val").mkdir()
    (folder / "val" / "a.txt").write_text("held out")
    source = TextFolder(str(folder), context=8)
    assert [path.name for path in source.files["val"]] == ["a.txt"]
    assert len(source.files["train"]) == 40
    total = sum(int(source.val_set()[index][1]["bytes"]) for index in range(len(source.val_set())))
    assert total == len("held out")


def test_a_folder_with_nothing_but_val_can_be_measured_on_but_not_trained_on(tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.txt").write_text("held out")
    assert len(TextFolder(str(tmp_path), held_out=1.0).files["val"]) == 1
    with pytest.raises(ValueError, match=r"has 1 files that end in .txt or .md, but none of them is to train on"):
        TextFolder(str(tmp_path))


def test_books_of_both_kinds_at_any_depth_are_found(folder):
    (folder / "A. Writer").mkdir()
    (folder / "A. Writer" / "A Book.md").write_text("---\ntitle: A Book\n---\n# One\n")
    source = TextFolder(str(folder), held_out=0.3)
    assert sum(map(len, source.files.values())) == 41
    assert source.found_in(folder) == {"name": "textfolder", "root": str(folder)}
    for number in range(50):
        (folder / f"{number}.jpg").touch()
    assert source.found_in(folder) is None
    assert source.found_in(folder / "nowhere") is None


@pytest.fixture(params=[False, True], ids=["in memory", "packed"])
def packs(request, monkeypatch):
    monkeypatch.setattr("linvit.data.text.files.IN_MEMORY", 0 if request.param else 2**24)
    return request.param


def test_damaged_texts_are_named_or_left_out(folder, packs, caplog):
    (folder / "val").mkdir()
    (folder / "val" / "a.txt").write_text("held out")
    (folder / "part0" / "latin.txt").write_bytes(b"caf\xe9")
    os.mkfifo(folder / "part0" / "pipe.txt")
    settings = {"cache": str(folder / "packed"), "context": 8}
    for _ in range(2):  # the second time, from the packed files
        with pytest.raises(
            ValueError, match=r"(?s)latin.txt is not text in UTF-8.*`max_corrupt`=0.*pipe.txt cannot be"
        ):
            TextFolder(str(folder), **settings).train_set()
        caplog.clear()
        source = TextFolder(str(folder), max_corrupt=2, **settings)
        assert source.stream("train").documents == 40
        assert "Left out (2 of at most 2)" in caplog.text
    assert source.stream("val").documents == 1
    assert (folder / "packed").is_dir() == packs
    (folder / "val" / "a.txt").write_bytes(b"\xff" * 9)
    with pytest.raises(ValueError, match="None of the 1 documents can be used"):
        TextFolder(str(folder), max_corrupt=9, **settings).val_set()


def test_large_text_is_packed_once_and_mapped_into_memory(folder, monkeypatch):
    in_memory = TextFolder(str(folder), held_out=0.3)
    expected = {split: in_memory.stream(split) for split in ("train", "val")}
    monkeypatch.setattr("linvit.data.text.files.IN_MEMORY", 0)
    monkeypatch.setattr("linvit.data.text.tokens.TOGETHER_BYTES", 300)
    settings = {"held_out": 0.3, "cache": str(folder / "packed")}
    TextFolder(str(folder), **settings).prepare_data()
    packed = {path: path.stat().st_mtime_ns for path in (folder / "packed").iterdir()}
    assert len(packed) == 6
    found = {split: TextFolder(str(folder), **settings).stream(split) for split in ("train", "val")}
    for split, stream in found.items():
        assert isinstance(stream.tokens, np.memmap)
        assert np.array_equal(stream.tokens, expected[split].tokens)
        assert stream.documents == expected[split].documents
    assert np.array_equal(found["val"].widths, expected["val"].widths)
    assert {path: path.stat().st_mtime_ns for path in (folder / "packed").iterdir()} == packed
    in_memory.files["train"][0].write_text("changed")
    assert len(TextFolder(str(folder), **settings).stream("train").tokens) < len(expected["train"].tokens)


@pytest.mark.parametrize("suffix", [".tokens", ".widths", ".json"])
def test_damaged_packed_text_is_refused(folder, suffix, monkeypatch):
    monkeypatch.setattr("linvit.data.text.files.IN_MEMORY", 0)
    cache = folder / "packed"
    TextFolder(str(folder), held_out=0.3, cache=str(cache)).stream("val")
    (file,) = cache.glob(f"val_*{suffix}")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{file.name} is (missing or damaged|not complete JSON)"):
        TextFolder(str(folder), held_out=0.3, cache=str(cache)).stream("val")


def test_another_split_holds_out_other_files(folder):
    first, again, other = (set(TextFolder(str(folder), held_out=0.3, split=split).files["val"]) for split in (0, 0, 1))
    assert first == again
    assert other - first
    assert len(first & other) < len(other)


def test_a_part_of_the_held_out_rows_is_spread_over_all_files(tmp_path):
    for part in range(4):
        (tmp_path / f"{part}.txt").write_text(" ".join(map(str, range(100 * part, 100 * part + 100))))

    def rows(**options):
        chosen = TextFolder(str(tmp_path), held_out=1.0, context=16, **options).val_set()
        return [chosen[place][0].tolist() for place in range(len(chosen))]

    every, few = rows(), rows(val_rows=7)
    places = [every.index(row) for row in few]
    assert len(places) == 7
    assert places[0] == 0
    assert {after - before for before, after in pairwise([*places, len(every)])} <= {
        len(every) // 7,
        len(every) // 7 + 1,
    }
    assert rows(val_rows=10**6) == every

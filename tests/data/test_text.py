import re

import pytest

from linvit.data import Stdlib, TextFolder
from linvit.data.text import NOT_READ


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        (tmp_path / f"part{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"part{number % 3}" / f"{number}.txt").write_text(f"text {number} " * 9)
    (tmp_path / "notes.md").write_text("no text")
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


def test_all_files_can_be_held_out_to_measure_on(folder):
    source = TextFolder(str(folder), held_out=1.0)
    assert (len(source.files["train"]), len(source.files["val"])) == (0, 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"held_out": 0.0}, "none of them is for part 'val'"),
        ({"suffixes": [".rst"]}, "has 0 files that end in .rst"),
        ({"context": 1}, "data.context is 1 tokens"),
        ({"batch_size": 0}, "data.batch_size is 0"),
    ],
)
def test_what_cannot_be_read_is_refused(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        TextFolder(str(folder), **arguments)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist: set data.root"):
        TextFolder(str(tmp_path / "nowhere"))

import json
import math
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from linvit.files import check_writable, read_checkpoint, remove_leftovers, replacing, write_json


def test_what_fails_halfway_leaves_the_old_file(tmp_path):
    path = tmp_path / "held.txt"
    path.write_text("before")

    def fail_halfway():
        with replacing(path) as temporary:
            temporary.write_text("aft")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["held.txt"]


class Executes:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("write", ["zip", "legacy", "pickle"])
def test_a_pickle_that_would_execute_code_is_refused(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pth"
    if write == "pickle":
        path.write_bytes(pickle.dumps({"model": Executes()}))
    else:
        torch.save({"model": Executes()}, path, _use_new_zipfile_serialization=write == "zip")
    with pytest.raises(ValueError, match=r"evil\.pth is refused because it is damaged or reading it could"):
        read_checkpoint(path)
    assert os.listdir(tmp_path) == ["evil.pth"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_truncated(tmp_path, suffix, kept):
    path = tmp_path / f"cut{suffix}"
    state = {"weight": torch.randn(1000)}
    torch.save(state, path) if suffix == ".pth" else save_file(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(ValueError, match=r"cut.* cannot be read, it is probably truncated: use another copy"):
        read_checkpoint(path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth does not exist"):
        read_checkpoint(tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds a list, expected a dictionary"):
        read_checkpoint(tmp_path / "list.pth")


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    kept = [tmp_path / name for name in (".hidden.tmp", "last.ckpt", ".a.12.tmp.bak", "notes.1.tmp")]
    left = tmp_path / ".last.ckpt.123.tmp"
    for path in (*kept, left):
        path.touch()
    remove_leftovers(tmp_path, tmp_path / "missing")
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    check_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be written .*choose another folder"):
        check_writable(tmp_path / "file" / "below")


def test_what_json_does_not_know_is_null(tmp_path):
    content = {"a": [math.nan, 1.5], "b": (math.inf, {"c": -math.inf}), "d": None, "e": "NaN"}
    write_json(tmp_path / "new" / "held.json", content)
    text = (tmp_path / "new" / "held.json").read_text()
    assert json.loads(text) == {"a": [None, 1.5], "b": [None, {"c": None}], "d": None, "e": "NaN"}

import errno
import json
import math
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from linvit.files import (
    check_output_file,
    check_writable,
    read_checkpoint,
    remove_leftovers,
    replacing,
    write_json,
    write_text,
)


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


def test_a_file_may_be_read_by_whom_the_system_lets_read_new_files(tmp_path):
    (tmp_path / "new").touch()
    with replacing(tmp_path / "weights.safetensors") as temporary:
        save_file({"weight": torch.zeros(2)}, temporary)
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode


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


@pytest.mark.parametrize("group", [None, "state_dict", "model"])
@pytest.mark.parametrize(
    "entry", [{7: torch.ones(2)}, {"a": torch.ones(2, dtype=torch.complex64)}], ids=["int", "complex"]
)
def test_weights_are_real_and_have_names(tmp_path, group, entry):
    torch.save({group: entry} if group else entry, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"contains (a complex tensor|a name that is not text)"):
        read_checkpoint(tmp_path / "a.pth")


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth does not exist"):
        read_checkpoint(tmp_path / "nowhere.pth")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="contains a list, expected a dictionary"):
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


def test_two_processes_may_check_a_folder_at_once_and_no_file_in_it_is_touched(tmp_path):
    (tmp_path / ".probe").write_text("precious")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check_writable, [tmp_path] * 400))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(".probe", "precious")]


def test_what_json_does_not_know_is_null(tmp_path):
    content = {"a": [math.nan, 1.5], "b": (math.inf, {"c": -math.inf}), "d": None, "e": "NaN"}
    write_json(tmp_path / "new" / "held.json", content)
    text = (tmp_path / "new" / "held.json").read_text()
    assert json.loads(text) == {"a": [None, 1.5], "b": [None, {"c": None}], "d": None, "e": "NaN"}


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in {tmp_path / "pipe": "pipe", tmp_path: "folder", Path("/dev/null"): "device"}.items():
        with pytest.raises(ValueError, match=f"is a .*{kind}.*: name a file"), replacing(path):
            pytest.fail("it was begun")
        with pytest.raises(ValueError, match="name a file"):
            check_output_file(path)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_file_that_cannot_be_written_is_named_and_not_its_temporary_name(tmp_path, error):
    with pytest.raises(OSError, match=r"held\.txt could not be written") as raised, replacing(tmp_path / "held.txt"):
        raise OSError(error, os.strerror(error))
    assert raised.value.errno == error
    assert ".tmp" not in str(raised.value)
    assert "Errno" not in str(raised.value)
    with pytest.raises(FileNotFoundError, match="other"), replacing(tmp_path / "held.txt"):
        (tmp_path / "other").read_text()  # what goes wrong elsewhere is not about this file


def test_a_parent_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="could not be written"), replacing(tmp_path / "file" / "x.csv"):
        pytest.fail("it was begun")
    with pytest.raises(OSError, match="cannot be written"):
        check_output_file(tmp_path / "file" / "x.csv")


def test_links_are_followed_and_home_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_text("~/one.txt", "one")
    (tmp_path / "link").symlink_to(tmp_path / "one.txt")
    write_text(tmp_path / "link", "two")
    assert (tmp_path / "one.txt").read_text() == "two"
    assert (tmp_path / "link").is_symlink()


def test_a_long_name_can_be_written(tmp_path):
    path = tmp_path / f"{'é' * 120}.txt"
    write_text(path, "whole")
    assert path.read_text() == "whole"


def test_names_that_are_not_utf_8_are_written_and_found_again(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    write_text(tmp_path / "names.json", json.dumps([name, "née"], ensure_ascii=False))
    assert json.loads((tmp_path / "names.json").read_text(encoding="utf-8")) == [name, "née"]
    write_text(tmp_path / "names.csv", name)
    assert (tmp_path / "names.csv").read_text(encoding="utf-8") == r"caf\udce9.png"

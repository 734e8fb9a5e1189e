import pickle

import pytest
import torch

from linvit.tasks.checkpoints import AtomicCheckpointIO, read_checkpoint, replacing


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


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"step": 1}, path)

    def save_until_full(content, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save_until_full)
    with pytest.raises(OSError, match=r"could not be written \(.*No space left on device\); the one before it is"):
        files.save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert files.load_checkpoint(path) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint at .*none\.ckpt"):
        read_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_checkpoint_is_refused(tmp_path, share):
    path = tmp_path / "cut.ckpt"
    torch.save({"state_dict": {"weight": torch.randn(200)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(path)


class Bomb:
    def __init__(self, fuse):
        self.fuse = fuse

    def __reduce__(self):
        return open, (str(self.fuse), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, zipped):
    path, fuse = tmp_path / "bomb.ckpt", tmp_path / "ran"
    if zipped:
        torch.save({"state_dict": Bomb(fuse)}, path)
    else:
        path.write_bytes(pickle.dumps({"state_dict": Bomb(fuse)}))
    with pytest.raises(ValueError, match="could run code"):
        read_checkpoint(path)
    assert not fuse.exists()


def test_a_checkpoint_is_a_dictionary(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="holds a list"):
        read_checkpoint(tmp_path / "list.ckpt")

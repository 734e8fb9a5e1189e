import pytest
import torch

from linvit.tasks.checkpoints import AtomicCheckpointIO


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

"""What can break under a run: each ends in one clear message and leaves the last good checkpoint whole."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from tiny_run import At, content, curve, differing, write_recipe

from linvit.data.images import Digits
from linvit.data.images.small import Shifted
from linvit.runs.training import train_folder
from linvit_cli import main

SOON = {"max_epochs": 3}


@contextlib.contextmanager
def small_files():
    """Puts the limit of a file's size back at the end; writing beyond it fails as on a full disk, also under root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train_folder(write_recipe(tmp_path_factory.mktemp("straight"), trainer=SOON))


def check_first_epoch_is_kept(run, straight):
    assert content(run)["global_step"] == 3
    train_folder(run.parent / "tiny.yaml", resume=True)
    assert not list(run.rglob(".*.tmp"))
    assert differing(run, straight) == []
    assert curve(run) == curve(straight)


@pytest.mark.filterwarnings("ignore:Exception in thread")  # of TensorBoard's writer; the command line hides it
@pytest.mark.slow
@pytest.mark.parametrize("room", [4096, 1_000_000])
def test_a_full_disk_stops_with_one_sentence_and_resume_goes_on(straight, tmp_path, room):
    recipe = write_recipe(tmp_path, trainer=SOON)
    assert (straight / "checkpoints" / "last.ckpt").stat().st_size > 2_000_000
    with (
        small_files() as limit,
        pytest.raises(OSError, match=r"could not be written .*train again with `resume=True`") as error,
    ):
        train_folder(recipe, callbacks=[At(4, lambda *_: limit(room))])
    assert "\n" not in str(error.value)
    check_first_epoch_is_kept(tmp_path / "run", straight)


@pytest.mark.slow
def test_checkpoints_that_can_no_longer_be_written_stop_with_one_sentence(straight, tmp_path):
    folder = tmp_path / "run" / "checkpoints"

    def block(*_):  # a file in the folder's place: the only thing that root, too, cannot write into
        folder.rename(tmp_path / "kept")
        folder.touch()

    with pytest.raises(OSError, match=r"last\.ckpt could not be written .*train again with `resume=True`"):
        train_folder(write_recipe(tmp_path, trainer=SOON), callbacks=[At(4, block)])
    folder.unlink()
    (tmp_path / "kept").rename(folder)
    check_first_epoch_is_kept(tmp_path / "run", straight)


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["train", str(write_recipe(tmp_path)), f"folder={tmp_path / 'file' / 'run'}"]) == 2
    said = capsys.readouterr()
    assert f"The folder {tmp_path / 'file' / 'run'} cannot be written (Not a directory)" in said.err
    assert "epoch" not in said.out


class Deadly(Shifted):
    """Kills the process that reads one image, as the machine's memory guard does; never the process of the test."""

    def __getitem__(self, index):
        if index == 100 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_reading_process_that_dies_stops_with_one_sentence(tmp_path, monkeypatch, capsys):
    whole = Digits.train_set

    def later(source):
        part = whole(source)
        return Deadly(part.images, part.targets, part.max_shift)

    recipe = str(
        write_recipe(tmp_path, trainer={"max_epochs": 2, "limit_train_batches": None}, data={"batch_size": 64})
    )
    assert main(["train", recipe, "trainer.max_epochs=1", "trainer.limit_train_batches=2"]) == 0
    before = content(tmp_path / "run")["global_step"]
    monkeypatch.setattr(Digits, "train_set", later)
    capsys.readouterr()
    assert main(["train", recipe, "--resume", "data.num_workers=1"]) == 2
    said = capsys.readouterr().err
    summary, start, sentence = said.strip().splitlines()
    assert summary.startswith("Training ravlt_nano")
    assert start == "Starting processes that read the data: 1."
    assert sentence.startswith("linvit: A process that reads data was killed (DataLoader worker")
    assert sentence.endswith("a training continues with --resume.")
    assert content(tmp_path / "run")["global_step"] == before


@pytest.mark.slow
def test_killed_while_saving_keeps_the_checkpoint_before_and_resume_goes_on(straight, tmp_path):
    recipe = write_recipe(tmp_path, trainer=SOON)
    code = f"""
import os, signal, torch
from linvit.runs.training import train_folder
whole, saved = torch.save, []
def save(content, file):
    saved.append(file)
    if len(saved) < 3:  # last and best of the first epoch
        return whole(content, file)
    whole(content, file)
    os.truncate(file, 1_000_000)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
train_folder({str(recipe)!r})
"""
    killed = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "run").rglob(".*.tmp"))) == 1
    check_first_epoch_is_kept(tmp_path / "run", straight)

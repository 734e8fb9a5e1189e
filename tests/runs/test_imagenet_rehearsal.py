"""ImageNet in a day, rehearsed in miniature: a published recipe over two processes, killed, resumed, and evaluated."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from imagenet_folder import write_imagenet, write_shards, write_tars
from tiny_run import curve

from linvit_cli import main

NAMES = tuple(f"n{number:08}" for number in range(10))
TRAIN, VAL, EPOCHS = 100, 5, 3
COMMAND = (
    *(sys.executable, "-m", "linvit_cli", "train", "ravlt/tiny_imagenet_300e", "--resume"),
    *("model.name=ravlt_nano", "data.size=32", "data.batch_size=25", "data.num_workers=1"),
    *(
        f"trainer.max_epochs={EPOCHS}",
        "schedule.warmup_epochs=1",
        "trainer.precision=32-true",
        "trainer.accelerator=cpu",
    ),
    *("trainer.devices=2", "trainer.strategy=ddp", "trainer.sync_batchnorm=false"),
)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data") / "imagenet", TRAIN, (VAL,) * len(NAMES), NAMES)


def settings(source, imagenet, folder):
    """The data of a run. Processes cannot share a stream's validation images, so that shards are evaluated later."""
    if source == "folders":
        return [f"data.root={imagenet}"]
    if source == "tar":
        files = write_tars(imagenet, folder)
        return ["data.name=timm", f"data.root={files}/train.tar", f"data.val_root={files}/val.tar"]
    shards = write_shards(imagenet, folder, NAMES, 200)
    stream = ["data.name=timm", "data.reader=wds/pictures", f"data.root={shards}", "data.val_split=val"]
    return [*stream, f"data.num_labels={len(NAMES)}", "data.repeats=1", "trainer.limit_val_batches=0"]


def train(folder, *overrides):
    """Starts a training in a session of its own, so that all its processes can be killed at once."""
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [*COMMAND, f"folder={folder}", *overrides],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def killed_after_an_epoch(folder, *overrides):
    process, end = train(folder, *overrides), time.monotonic() + 300
    while not (folder / "metrics.csv").exists():  # written after the checkpoint
        assert process.poll() is None, folder.with_suffix(".log").read_text()
        assert time.monotonic() < end
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return len(curve(folder))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folders", "tar", "shards"])
def test_a_published_recipe_is_trained_by_two_processes_killed_and_resumed(source, imagenet, tmp_path, capsys):
    run, data = tmp_path / "run", settings(source, imagenet, tmp_path)
    before = killed_after_an_epoch(run, *data)
    assert before < EPOCHS
    process = train(run, *data)
    assert process.wait(timeout=300) == 0, run.with_suffix(".log").read_text()
    epochs = curve(run)
    assert [int(row["epoch"]) for row in epochs] == [1, 2, 3]
    assert float(epochs[-1]["train_loss"]) < float(epochs[0]["train_loss"])
    assert source == "shards" or {"top1", "ema_top1"} <= epochs[-1].keys()

    by_number = tmp_path / "imagenetv2"
    for number, name in enumerate(NAMES):
        shutil.copytree(imagenet / "val" / name, by_number / str(number))
    own = by_number if source == "shards" else imagenet  # the classes of shards have numbers
    for overrides in ([f"data.root={own}"], [f"data.root={own}", "data.size=64"], [f"data.root={by_number}"]):
        folders = ["data.name=imagefolder", *overrides] if source != "folders" else overrides
        capsys.readouterr()
        assert main(["eval", str(run), "--json", *folders]) == 0
        measured = json.loads(capsys.readouterr().out)
        assert measured["ema"]["images"] == VAL * len(NAMES)
        assert 0 <= measured["ema"]["top1"] <= 1

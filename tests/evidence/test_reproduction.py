"""One command for a published table: what it refuses, the commands that it plans, and a tiny table that is resumed."""

import csv
import re
import signal
import subprocess
import threading
import time
from functools import cache

import pytest
from imagenet_folder import write_imagenet
from tiers import quick

from evidence import reproduce, reproduction
from evidence.__main__ import arguments, main
from evidence.gpu import rows as gpu_rows
from evidence.gpu.networks import IMAGENET
from linvit.bundled import bundled_files
from linvit.runs.folder import read_curves
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe

TABLE = "RALA, Table 3"
TABLES = [
    *(f"RALA, Table {number}" for number in range(3, 11)),
    *(f"MALA, Table {number}" for number in (1, 2, 3, 4, 5, 9, 10, 11)),
    *(f"CARE, Table {number}" for number in range(1, 6)),
]
EPOCHS = 4
recipe_rows = cache(reproduce.recipe_rows)


@pytest.fixture(autouse=True)
def _rows_are_read_once(monkeypatch):
    monkeypatch.setattr(reproduction, "recipe_rows", recipe_rows)


def options(*words):
    return arguments().parse_args(["reproduce", *map(str, words)])


def planned(*words):
    given = options(*words)
    return list(reproduction.plan(reproduction.rows_of(given.table), given))


def refused(capsys, *words):
    assert main(["reproduce", *map(str, words)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("table", quick(TABLES, ["RALA, Table 3", "MALA, Table 11", "CARE, Table 2"]))
def test_every_table_of_images_has_its_commands(table):
    networks = planned(table, "--dry")
    assert [network.row for network in networks] == [row for row in recipe_rows() if row.table == table]
    assert len({network.folder for network in networks}) == len(networks)
    for network in (networks[0], networks[-1]):
        command, name, resume, *settings = network.words
        assert (command, resume) == ("train", "--resume")
        recipe = Recipe(read_recipe(name, settings))
        assert recipe.values["trainer"]["devices"] == (12 if "care" in name and "dense" not in name else 8)
        assert recipe.folder == network.folder
        assert bool(recipe.values["init"]) == name.startswith("dense/")


def test_a_dry_run_prints_rows_commands_and_hours(capsys, tmp_path):
    assert main(["reproduce", TABLE, "--dry", "--runs", str(tmp_path), "--set", "seed=3"]) == 0
    printed = capsys.readouterr().out
    assert "RAVLT-T: top-1 82.8 %; about 42 A100 hours\n    linvit train ravlt/tiny_imagenet_300e --resume" in printed
    assert printed.count("seed=3") == 4
    assert printed.endswith("\nTogether: 570 A100 hours\n")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said_in_one_sentence_before_anything_is_trained(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "train", None)
    runs = ("--runs", tmp_path / "runs", "--devices", 1)
    assert "RALA, Table 3 needs ImageNet-1k, but no folder was given for it: set --imagenet." in refused(capsys, TABLE)
    assert "the folder nowhere does not exist: set --imagenet" in refused(capsys, TABLE, "--imagenet", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, TABLE, "--imagenet", tmp_path / "empty", *runs)
    wrong = refused(capsys, TABLE, "--imagenet", tmp_path, *runs, "--set", "data.sise=3")
    assert "Did you mean 'data.size'?" in wrong
    none = refused(capsys, TABLE, "--imagenet", tmp_path, "--runs", tmp_path / "runs", "--devices", 0)
    assert "trainer.devices is 0" in none
    weights = refused(capsys, "RALA, Table 4", "--coco", tmp_path, "--weights", tmp_path / "nowhere")
    assert "nowhere does not exist: correct --weights" in weights
    mixed = refused(capsys, "MALA, Table 10", "--imagenet", tmp_path)
    assert "MALA, Table 10 needs ADE20K" in mixed
    assert "no recipes for 'RALA, Table 2', expected one of RALA, Table 3; " in refused(capsys, "RALA, Table 2")
    assert {*re.findall(r"\w+, Table \d+", refused(capsys, "T"))} == {*TABLES}
    assert "is trained on LibriSpeech" in refused(capsys, "MALA, Table 7")
    assert not (tmp_path / "runs").exists()


def test_detectors_start_from_the_authors_weights_or_from_finished_runs(tmp_path):
    words = ("RALA, Table 4", "--coco", tmp_path, "--runs", tmp_path, "--weights", tmp_path)
    sizes = ("small", "base", "large")
    with pytest.raises(ValueError, match=r"not there .*ravlt_small_imagenet_300e, .*ravlt_large_imagenet_300e\)"):
        planned(*words)
    for size in sizes[1:]:
        (tmp_path / f"ravlt_{size}_imagenet_300e").mkdir()
        (tmp_path / f"ravlt_{size}_imagenet_300e" / "evaluation.json").touch()
    (tmp_path / "RAVLT_S.pth").touch()
    inits = [re.search(r"init=(\S+)", " ".join(network.words))[1] for network in planned(*words)]
    assert inits == [f"{tmp_path}/{name}" for name in ("RAVLT_S.pth", *(f"ravlt_{x}_imagenet_300e" for x in sizes[1:]))]
    networks = planned("RALA, Table 9", "--imagenet", tmp_path, "--coco", tmp_path, "--ade20k", tmp_path)
    assert f"init={networks[0].folder}" in networks[1].words  # which is trained before it


def test_a_detector_has_a_line_for_each_published_value(tmp_path):
    network = planned("CARE, Table 2", "--dry", "--runs", tmp_path)[0]
    network.folder.mkdir()
    network.evaluation.write_text('{"raw": {"box_ap": 0.4, "box_ap50": 0.6, "mask_ap75": 0.3, "images": 9}}')
    lines = {line["measure"]: (line["published"], line["ours"]) for line in reproduction.lines_of(network)}
    assert [*lines] == ["box AP", "box AP50", "box AP75", "mask AP", "mask AP50", "mask AP75"]
    assert lines["box AP"] == ("40.3", "40.0")
    assert lines["mask AP75"] == ("39.2", "30.0")
    assert lines["mask AP"] == ("36.8", "–")


def test_hours_are_those_of_measured_throughput(tmp_path, monkeypatch):
    files = {name: file for name, file in bundled_files().items() if re.match("ravlt|mavit|care", name)}
    monkeypatch.setattr(reproduce, "bundled_files", lambda: files)
    key = {"torch": "2", "triton": "3", "code": "", "card": "NVIDIA H200"}
    for job, case, cells in (
        ("sizes", "ravlt_tiny, compiled, 224 px, 64 images", {"network": "ravlt_tiny", "images/s": 9e9}),
        ("sizes", "training ravlt_small", {"network": "ravlt_small", "images/s": 2000.0}),
        ("sizes", "training ravlt_base", {"network": "ravlt_base", "images/s": None}),
        ("sizes", "training mavit_tiny", {"network": "mavit_tiny", "images/s": 6000.0}),
        ("published", "mavit_tiny", {"network": "mavit_tiny", "images/s with the loader": 5000.0}),
        ("published", "care_s1", {"network": "care_s1", "images/s with the loader": 5000.0}),
    ):
        gpu_rows.append(tmp_path, {"job": job, "case": case, **key, "cells": [cells]})
    rows = reproduce.recipe_rows(tmp_path)
    costs = {row.recipe: row.cost for row in rows}
    hours = 300 * IMAGENET / 5000 / 3600
    assert (
        costs["mavit/tiny_imagenet_300e"] == f"about {hours:.0f} H200 hours, measured: 5,000 images/s with the loader"
    )
    steps = "about 53 H200 hours, measured: 2,000 images/s in steps without a loader"
    assert costs["ravlt/small_imagenet_300e"] == steps
    changed = {name for name in costs if "images/s" in costs[name]}
    assert changed == {"mavit/tiny_imagenet_300e", "ravlt/small_imagenet_300e"}  # CARE's have a teacher
    texts = reproduce.sections(tmp_path)
    assert "; ImageNet-1k; 42 to 280 A100 hours each, 53 H200 hours each |" in texts["RALA"]
    assert texts["total"].endswith("With measured throughput 2 more take 74 H200 hours.\n")


def tiny_rows(folder):
    """Three networks of a table of their own; the loss of the last becomes NaN."""
    rows = []
    for name, rate in (("ravlt_nano", 1e-3), ("mavit_nano", 1e-3), ("care_nano", 1e15)):
        recipe = folder / f"{name}.yaml"
        recipe.write_text(
            f"folder: runs/tiny_{name}\nmodel: {{name: {name}}}\ntask: {{ema_decay: 0.9}}\n"
            f"data: {{name: imagefolder, size: 32, batch_size: 8, num_workers: 0}}\n"
            f"trainer: {{max_epochs: {EPOCHS}, accelerator: cpu}}\noptimizer: {{lr: {rate}}}\n"
        )
        command = f"linvit train {recipe} data.root=/data/imagenet trainer.devices=1"
        published = "parameters 1 M, top-1 82.8 %"
        rows.append(
            reproduce.Row("", "T", name, published, str(recipe), command, "ImageNet-1k", "", "about 1 A100 hours")
        )
    return rows


@pytest.mark.slow
def test_a_tiny_table_is_trained_stopped_and_resumed(tmp_path, monkeypatch, capsys):
    rows, runs = tiny_rows(tmp_path), tmp_path / "runs"
    imagenet = write_imagenet(tmp_path / "imagenet", 20)
    words = ["reproduce", "T", "--imagenet", str(imagenet), "--runs", str(runs)]
    monkeypatch.setattr(reproduction, "recipe_rows", lambda: rows)
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def stop():
        end = time.monotonic() + 120
        while not (runs / "tiny_ravlt_nano" / "metrics.csv").exists() and time.monotonic() < end:
            time.sleep(0.05)
        started[0].send_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    thread = threading.Thread(target=stop)
    thread.start()
    assert main(words) == 130
    thread.join()
    assert "the same command goes on" in capsys.readouterr().err
    before, *_, other = csv.DictReader((runs / "t.csv").open())
    reached = len(read_curves(runs / "tiny_ravlt_nano"))
    assert (before["epochs"], before["ours"], other["epochs"]) == (f"{reached} of {EPOCHS}", "–", "–")
    assert reached < EPOCHS

    assert main(words) == 2
    error = capsys.readouterr().err
    assert "not every network was trained.\ncare_nano: linvit: " in error
    assert "loss" in error
    assert [row["epoch"] for row in read_curves(runs / "tiny_ravlt_nano")] == list(range(1, EPOCHS + 1))
    *lines, diverged = csv.DictReader((runs / "t.csv").open())
    assert diverged["ours"] == "–"
    assert [line["network"] for line in lines] == ["ravlt_nano", "mavit_nano"]
    for line in lines:
        assert (line["measure"], line["published"], line["epochs"]) == ("top-1", "82.8", f"{EPOCHS} of {EPOCHS}")
        assert 0 <= float(line["ours"]) <= 100
        assert 0 <= float(line["of the average"]) <= 100
        seconds = sum(row["seconds"] for row in read_curves(runs / f"tiny_{line['network']}"))
        assert float(line["images/s"]) == pytest.approx(EPOCHS * 7 * 8 / seconds, abs=0.6)  # 60 images in batches of 8
        assert float(line["GPU hours"]) == pytest.approx(seconds / 3600, abs=0.006)
        assert line["GPUs"].startswith("1 × ")
    assert "| ravlt_nano |" in (runs / "t.md").read_text()
    started.clear()
    assert main(words) == 2
    assert [process.args[4] for process in started] == [rows[2].recipe]

import os
import re

import pytest
import torch
import yaml
from images_by_class import write_classes

from linvit.analysis.cost import Cost
from linvit.runs import load_run, new_recipe, own_images, train
from linvit.runs.own_images import GIB, _batch_size
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.runs.training import train_folder

SHORT = [
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=1",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
]


@pytest.fixture
def photos(tmp_path):
    return write_classes(tmp_path / "photos", {"ant": 10, "bee": 10})


def test_the_recipe_trains_and_is_fine_tuned(photos, tmp_path):
    written = new_recipe(tmp_path / "mine.yaml", "ravlt_nano", photos, None, epochs=3)
    words, _, time = written.describe().rpartition("; an epoch takes about ")
    assert words == (
        "2 classes, 16 images to train on, 4 held out; 32×32 px, 4 images per batch; 3 epochs from random weights"
    )
    assert re.fullmatch(r"\d+ s on this machine, all of them \d+ s", time)
    run = train(written.path, SHORT, folder=tmp_path / "run")
    assert run.evaluate()["images"] == 4
    tuned = new_recipe(tmp_path / "tuned.yaml", "ravlt_nano", photos, init=run.folder)
    before, after = (Recipe(read_recipe(path)).resolved() for path in (written.path, tuned.path))
    assert after["init"] == str(run.folder)
    assert after["optimizer"]["lr"] < before["optimizer"]["lr"]
    assert (before["trainer"]["max_epochs"], after["trainer"]["max_epochs"]) == (3, 20)
    assert after["data"]["mean"] == before["data"]["mean"]  # those of the run that it starts from
    train(tuned.path, SHORT, folder=tmp_path / "tuned")


def test_foreign_weights_keep_the_mean_of_their_training(photos, tmp_path):
    torch.save(load_run(model="ravlt_nano", untrained=True).network.state_dict(), tmp_path / "weights.pth")
    new_recipe(tmp_path / "mine.yaml", "ravlt_nano", photos, init=tmp_path / "weights.pth")
    assert read_recipe(tmp_path / "mine.yaml")["data"]["mean"] == [0.485, 0.456, 0.406]
    with pytest.raises(ValueError, match=r"weights in .*weights.pth do not fit"):
        new_recipe(tmp_path / "other.yaml", "mavit_tiny", photos, init=tmp_path / "weights.pth")
    with pytest.raises(FileNotFoundError, match=r"nowhere.pth does not exist"):
        new_recipe(tmp_path / "other.yaml", "ravlt_nano", photos, init=tmp_path / "nowhere.pth")
    assert not (tmp_path / "other.yaml").exists()


def test_weights_that_come_with_linvit_are_fine_tuned_by_name(photos, tmp_path):
    assert new_recipe(tmp_path / "mine.yaml", "mavit_nano", photos).init == "mavit_nano.cifar10"
    written = read_recipe(tmp_path / "mine.yaml")
    assert (written["init"], written["data"]["mean"][0]) == ("mavit_nano.cifar10", 0.4914), "as for CIFAR-10"
    run = train(tmp_path / "mine.yaml", [*SHORT, "optimizer.lr=2e-6"], folder=tmp_path / "run")
    runs = run, load_run(model="mavit_nano.cifar10")
    tuned, original = (each.network.state_dict()["stem.0.weight"] for each in runs)
    torch.testing.assert_close(tuned, original, rtol=1e-3, atol=1e-5)
    with pytest.raises(FileNotFoundError, match=r"mavit_tiny.cifar10 does not exist"):
        new_recipe(tmp_path / "other.yaml", "mavit_tiny", photos, init="mavit_tiny.cifar10")


@pytest.mark.parametrize(("step", "epochs"), [(0.1, 20), (4.1, 16), (60.0, 8)])
def test_on_a_slow_machine_the_epochs_from_weights_of_linvit_fit_five_minutes(
    step, epochs, photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(own_images, "measured", lambda rehearse, most: {1: step})  # of four images; an epoch has 17⅓
    written = new_recipe(tmp_path / "mine.yaml", "ravlt_nano", photos)
    assert (written.epochs, read_recipe(written.path)["trainer"]["max_epochs"]) == (epochs, epochs)
    assert (f"; {epochs} epochs (20 on a faster machine) from" in written.describe()) == (epochs < 20)
    for name, init in {"asked": "shipped", "scratch": None}.items():
        asked = new_recipe(tmp_path / f"{name}.yaml", "ravlt_nano", photos, init, epochs=30)
        assert (asked.epochs, read_recipe(asked.path)["trainer"]["max_epochs"]) == (30, 30)


def test_files_that_are_not_read_are_said_once(photos, tmp_path, caplog):
    (photos / "ant" / "film.mov").touch()
    new_recipe(tmp_path / "mine.yaml", "ravlt_nano", photos)
    assert caplog.text.count("Not read as images") == 1


def test_a_size_that_is_given_is_kept_and_weights_for_other_classes_lose_their_classifier(tmp_path, capsys):
    ten = write_classes(tmp_path / "ten", {f"class{number}": 4 for number in range(10)})
    written = new_recipe(tmp_path / "mine.yaml", "care_nano", ten, size=64)
    assert (written.size, read_recipe(written.path)["data"]["size"]) == (64, 64)
    train_folder(written.path, SHORT, folder=tmp_path / "run", progress=True)
    assert "without its classifier, which is for other classes" in capsys.readouterr().out


@pytest.mark.parametrize("odd", ["#", '"', "1e5", "a\nseed: 1", "\udcff"])
def test_names_of_any_kind_are_valid_yaml(odd, tmp_path):
    root = write_classes(tmp_path / odd, {odd: 5, "bee": 5}, size=(32, 32))
    written = new_recipe(tmp_path / "mine.yaml", "ravlt_nano", root)
    values = read_recipe(written.path)
    assert (values["data"]["root"], values["seed"]) == (str(root), 0)
    assert set(written.images.counts) == {odd, "bee"}
    assert Recipe(values).source().num_classes == 2


@pytest.mark.parametrize(
    ("side", "model", "size"),
    [(28, "mavit_tiny", 32), (90, "mavit_tiny", 96), (400, "mavit_tiny", 224), (40, "deit_tiny_rala", 224)],
)
def test_the_size_is_that_of_the_images_or_of_the_model(side, model, size, tmp_path):
    root = write_classes(tmp_path / "photos", {"ant": 5, "bee": 5}, size=(side, side + 20))
    written = new_recipe(tmp_path / "mine.yaml", model, root)
    assert written.size == size
    assert yaml.safe_load(written.path.read_text())["data"]["crop_pct"] == (0.875 if side == 400 else 1.0)


def test_the_batch_fits_memory_and_images(monkeypatch):
    cost = Cost(15_000_000, 2_400_000_000, 200_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for memory, count, size in ((140, 10**6, 128), (16, 10**6, 16), (140, 100, 16), (1, 10**6, 2), (140, 8, 2)):
        monkeypatch.setattr(own_images, "memory", lambda device, memory=memory: memory * GIB)
        assert _batch_size(cost, count) == size
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(own_images, "memory", lambda device: 140 * GIB)
    assert _batch_size(cost, 10**6) == 32


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"ant": 20}, "has one class, 'ant', expected two or more"),
        ({"ant": 3, "bee": 2}, "has 3 images to train on, expected 8 or more"),
        (None, "does not exist: set `data` to a folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(counts, message, tmp_path):
    if counts is not None:
        (tmp_path / "photos").mkdir()
        write_classes(tmp_path / "photos", counts)
    with pytest.raises(ValueError, match=message) as error:
        new_recipe(tmp_path / "mine.yaml", "ravlt_nano", tmp_path / "photos")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) in ([], ["photos"])


def test_nothing_is_overwritten_and_models_are_known(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("precious")
    for path in (tmp_path / "mine.yaml", "~/mine.yaml"):
        with pytest.raises(ValueError, match=r"mine.yaml exists already"):
            new_recipe(path, "ravlt_nano", photos)
    assert (tmp_path / "mine.yaml").read_text() == "precious"

import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from stand_in_weights import write_black_cifar10, write_stand_ins
from tiny_diffusion import write_diffusion_recipe
from tiny_run import check_resumes_bit_for_bit, content, curve

from linvit.models.family import CIFAR10
from linvit.runs import load_run, train
from linvit.runs.tasks.diffusion import _class_number
from linvit.runs.training import train_folder
from linvit.tasks import sampling
from linvit_cli import main


@pytest.fixture(scope="module", autouse=True)
def _quick_classifier():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "EPOCHS", 1)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_folder(write_diffusion_recipe(tmp_path_factory.mktemp("diffusion")))


def test_it_learns_and_is_measured_by_what_its_moving_average_generates(run):
    rows = curve(run)
    losses = [float(row["train_loss"]) for row in rows]
    assert losses[-1] < losses[0] - 0.1
    distances = [float(row["ema_fid"]) for row in rows]
    best = 1 + distances.index(min(distances))
    assert content(run, "best")["global_step"] == 4 * best
    last = {key: float(value) for key, value in rows[-1].items()}
    assert last["ema_floor_fid"] < last["ema_noise_fid"]
    assert all(0 <= last[f"ema_{name}_accuracy"] <= 1 for name in ("generated", "guided", "classifier"))
    assert "fid" not in last


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_diffusion_recipe(tmp_path)
    check_resumes_bit_for_bit(recipe, run, step=6, fewest=20)


def test_a_loaded_run_measures_as_the_last_epoch_did_and_keeps_its_classifier(run, monkeypatch):
    monkeypatch.setattr(sampling, "EPOCHS", 0)  # an untrained classifier would give other figures
    measures = load_run(run / "checkpoints" / "last.ckpt").evaluate()
    last = curve(run)[-1]
    for name, value in measures.items():
        if name != "images":
            assert value == pytest.approx(float(last[f"ema_{name}"]), rel=1e-4, abs=1e-6), name
    assert measures.by_weights["raw"].keys() == {"loss", "images"}
    assert measures["images"] == 36
    assert "FID-like, guided" in measures.table()[1]


@pytest.mark.slow
def test_the_measures_do_not_depend_on_the_batch_size(run):
    alone, together = (load_run(run).evaluate(batch_size=size) for size in (1, 17))
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("names", "wanted", "found"),
    [
        (["1", "2", "3"], [0, 1, 2, "1", "2", "3"], [0, 1, 2, 0, 1, 2]),
        (["1", "2", "3"], [np.int64(2), torch.tensor(1)], [2, 1]),
        (["cat", "dog"], ["0", "1", "dog", 1], [0, 1, 1, 1]),
    ],
)
def test_an_int_is_the_index_of_a_class_and_text_its_name(names, wanted, found):
    assert [_class_number(one, names) for one in wanted] == found
    for unknown in (len(names), -1, "0" if "1" in names else "7", "horse"):
        with pytest.raises(ValueError, match=f"class {unknown!r} is unknown: name one of {names[0]}, "):
            _class_number(unknown, names)


def test_without_dropped_classes_there_is_no_guidance(tmp_path):
    folder = train_folder(write_diffusion_recipe(tmp_path, task={"class_dropout": 0.0}, trainer={"max_epochs": 1}))
    (last,) = curve(folder)
    assert "ema_generated_accuracy" in last
    assert not [name for name in last if "guided" in name]
    loaded = load_run(folder)
    assert not [name for name in loaded.evaluate() if "guided" in name]
    for guidance in (0.0, 4.0):
        with pytest.raises(ValueError, match=f"`guidance` is {guidance:g}, but this network was trained with"):
            loaded.generate(guidance=guidance, count=1, steps=2)
    assert len(loaded.generate(guidance=1.0, count=1, steps=2, output=tmp_path / "a.PNG")) == 10
    page = loaded.report(tmp_path / "page.html").read_text()
    assert "<h2>Generated images</h2>" in page
    assert "do not compare them with published FIDs" in page


def test_generate_writes_a_row_for_each_class_and_the_same_ones_again(run, tmp_path, capsys):
    asked = ["generate", str(run), "--classes", "3", "5", "--count", "4", "--steps", "3", "--guidance", "2"]
    for name in ("one.png", "two.png"):
        assert main([*asked, "--output", str(tmp_path / name)]) == 0
    assert main([*asked, "--seed", "1", "--output", str(tmp_path / "other.png")]) == 0
    assert "contains 8 images" in capsys.readouterr().out
    one, two, other = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("one", "two", "other"))
    assert one.shape == (2 * 50 + 2, 4 * 50 + 2, 3)
    assert (one == two).all()
    assert (one != other).any()


def test_all_images_in_one_file_are_as_evaluation_suites_read_them(run, tmp_path):
    loaded = load_run(run)
    images = loaded.generate(classes=["3", 5], count=2, steps=3, sampler="ddpm")
    assert (images.images.shape, images.images.dtype, len(images)) == ((4, 1, 8, 8), torch.uint8, 4)
    images.save(tmp_path / "all.npz")
    held = np.load(tmp_path / "all.npz")
    assert held["arr_0"].shape == (4, 8, 8, 3)
    assert held["arr_0"].dtype == np.uint8
    assert held["labels"].tolist() == images.labels.tolist() == [3, 3, 5, 5]
    with pytest.raises(ValueError, match=r"`classes` is \[\], expected a list of .*, at least one"):
        loaded.generate(classes=[])


def test_without_generation_the_loss_chooses(tmp_path):
    run = train(write_diffusion_recipe(tmp_path, task={"generates": False}, model={"learn_sigma": True}))
    assert all(math.isfinite(row["ema_loss"]) for row in run.history)
    assert "ema_fid" not in run.history[0]
    assert (run.task.score, run.path.name) == ("loss", "best.ckpt")
    measures = load_run(run.folder / "checkpoints" / "last.ckpt").evaluate()
    assert measures["loss"] == pytest.approx(run.history[-1]["ema_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_network_that_comes_with_linvit_measures_natural_images(tmp_path, monkeypatch):
    write_stand_ins(tmp_path, monkeypatch)
    write_black_cifar10(tmp_path, per_file=4)

    def recipe(classifier):
        return write_diffusion_recipe(
            tmp_path,
            model={"input_size": 32, "channels": 3, "patch_size": 8},
            task={"classifier": classifier},
            data={"name": "cifar_images", "root": str(tmp_path), "held_out": 0.0, "batch_size": 4},
            trainer={"max_epochs": 1},
        )

    with pytest.raises(
        ValueError, match=r"task.classifier is 'mavit_nano', expected a network whose weights come with"
    ):
        train(recipe("mavit_nano"))
    (tmp_path / "batches.meta.txt").write_text("\n".join(CIFAR10[:9]))
    with pytest.raises(ValueError, match="with 10 classes, but the data have 9: change it"):
        train(recipe("mavit_nano.cifar10"))
    assert not (tmp_path / "run").exists()
    write_black_cifar10(tmp_path, per_file=4)
    run = train_folder(recipe("mavit_nano.cifar10"))
    (last,) = curve(run)
    assert float(last["ema_floor_fid"]) == pytest.approx(0, abs=1e-3), "the held-out images are those trained on"
    assert float(last["ema_noise_fid"]) > 1e-3
    assert not (run / "classifier.safetensors").exists()


def test_a_damaged_classifier_is_named(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    (folder / sampling.FILE).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"classifier\.safetensors is damaged or belongs to other data"):
        load_run(folder).evaluate()


@pytest.fixture
def diverged(run):
    loaded = load_run(run)
    for network in loaded.task.networks().values():
        torch.nn.init.constant_(network.head.bias, math.nan)
    return loaded


def test_images_that_are_not_finite_are_refused(diverged, tmp_path):
    with pytest.raises(ValueError, match="The generated images are not finite"):
        diverged.generate(classes=["3"], count=1, steps=2, output=tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_images_that_are_not_finite_have_no_distance(diverged):
    measures = diverged.evaluate()
    assert math.isnan(measures["fid"])
    assert math.isfinite(measures["floor_fid"])

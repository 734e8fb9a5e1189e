"""Pyramids and CARE learn the features of a DeiT: train, resume, evaluate, and start a classifier."""

import re

import pytest
import timm
import torch
from safetensors.torch import save_model
from tiny_run import ONE_STEP, check_halves_make_a_batch, check_resumes_bit_for_bit, content, write_merged
from tiny_students import BASE, refused

import linvit
from linvit.runs.training import train_folder

NETWORKS = ("mavit_nano", "care_nano")


def write(folder, **groups):
    """A student of a DeiT with 4 × 4 patches: two epochs of three batches."""
    values = {
        "folder": str(folder / "run"),
        "seed": 1,
        "model": {"name": "mavit_nano"},
        "task": {"name": "transfer", "teacher_model": BASE},
        "optimizer": {"lr": 3e-3},
        "schedule": {"min_lr": 0.0},
        "data": {"name": "digits", "batch_size": 8, "max_shift": 2},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "limit_train_batches": 3, "limit_val_batches": 1},
    }
    return write_merged(folder / "tiny.yaml", values, groups)


def save_teacher(path, classes):
    """Weights under timm's names; returns the network."""
    torch.manual_seed(0)
    network = timm.create_model(
        **{"model_name" if key == "name" else key: x for key, x in BASE.items()}, num_classes=classes
    )
    save_model(network, str(path))
    return network


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    file = tmp_path_factory.mktemp("teacher") / "deit.safetensors"
    save_teacher(file, 1000)
    return file


@pytest.fixture(scope="module")
def run(teacher, tmp_path_factory):
    return train_folder(write(tmp_path_factory.mktemp("student"), task={"teacher": str(teacher)}))


def test_a_classifier_starts_from_a_student_of_another_shape(run, tmp_path):
    recipe = write(tmp_path, init=str(run), optimizer={"lr": 1e-9}, trainer=ONE_STEP)
    tuned = linvit.train(recipe, ["task=null", "task={name: classification}"]).network.state_dict()
    learned = linvit.load_run(run).network.state_dict()
    assert {name for name in tuned if name not in learned} == {"head.fc.weight", "head.fc.bias"}
    for name, value in learned.items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(value, tuned[name], rtol=0, atol=1e-6)


def test_the_layer_beside_the_student_is_trained_with_it(run):
    stored = content(run)
    assert stored["state_dict"]["projection.weight"].shape == (16, 128, 1, 1)
    [optimizer] = stored["optimizer_states"]
    *groups, beside = optimizer["param_groups"]
    weight, bias = (optimizer["state"][number]["exp_avg"] for number in beside["params"])
    assert (weight.shape, bias.shape) == ((16, 128, 1, 1), (16,))
    assert weight.any()
    assert {group["lr"] for group in groups} == {beside["lr"]}
    assert beside["weight_decay"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_error_falls(name, tmp_path):
    """Of students with 2 × 2 places, of a run as teacher."""
    recipe = write(tmp_path / "teacher", trainer={"max_epochs": 3, "limit_train_batches": 20})
    of_teacher = ["model=null", f"model={BASE}", "task=null", "task={name: classification}"]
    teacher = {"teacher": str(train_folder(recipe, of_teacher)), "teacher_model": {**BASE, "img_size": 64}}
    groups = {"task": {**teacher, "ema_decay": 0.5}, "model": {"name": name}, "data": {"size": 64}}
    run = linvit.train(write(tmp_path, **groups, trainer={"max_epochs": 3, "limit_train_batches": 20}))
    errors = [row["error"] for row in run.history]
    assert errors[-1] < errors[0]
    assert run.history[-1]["ema_error"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 4], ids=["in the first epoch", "at a start", "in the second epoch"])
def test_a_killed_run_resumes_bit_for_bit(step, teacher, run, tmp_path):
    check_resumes_bit_for_bit(write(tmp_path, task={"teacher": str(teacher)}), run, step, fewest=400)


@pytest.mark.slow
def test_accumulating_halves_of_a_batch_is_the_whole_batch(teacher, tmp_path):
    """Of a network without batch norms; the layer beside it, too, learns once a step."""
    groups = {"model": {**BASE, "patch_size": 16, "embed_dim": 24}, "task": {"teacher": str(teacher)}}
    check_halves_make_a_batch(write, tmp_path, half=8, rtol=1e-9, atol=1e-11, **groups)


@pytest.mark.slow
def test_a_loaded_run_evaluates_reports_and_does_not_predict(run, tmp_path):
    run = linvit.load_run(run)
    measured = run.evaluate()
    assert 0 < measured["error"] == measured["worst"]
    assert "top1" not in measured
    assert "taught by deit_tiny_patch16_224" in run.report(tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="has no classifier, so it cannot predict: train one from it"):
        run.predict([])


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1000, 0])
def test_weights_in_a_file_of_timm_teach(classes, tmp_path):
    network = save_teacher(tmp_path / "deit.safetensors", classes)
    task = linvit.train(write(tmp_path, task={"teacher": str(tmp_path / "deit.safetensors")})).task
    weights = network.state_dict()
    assert len(task.original.state_dict()) > 20
    assert all(tensor.equal(weights[name]) for name, tensor in task.original.state_dict().items())


def test_one_sentence_for_each_mistake(teacher, tmp_path):
    recipe = write(tmp_path, task={"teacher": str(teacher)})
    missing = "task.teacher_model is null, expected a model for a student of another shape, and null for a linearized"
    refused(missing, recipe, "task.teacher_model=null")
    linearized = ["model=null", f"model={{name: linearized, base: {BASE}}}"]
    refused("task.teacher_model is {'depth': 2, 'embed_dim'", recipe, *linearized)
    refused("nowhere", recipe, "task.teacher=nowhere", kind=FileNotFoundError)
    refused("do not fit this VisionTransformer: only ", recipe, "task.teacher_model.embed_dim=24")
    refused("Unknown model 'deit_tny'", recipe, "task.teacher_model.name=deit_tny")
    refused("teacher_model.pretrained is True, but weights are never", recipe, "task.teacher_model.pretrained=true")
    refused("task.features is set, but only maps of a linearized student fit", recipe, "task.features=[-1]")
    larger = ["task.teacher_model.img_size=64", "task.teacher=null"]
    refused("data.size is 32×32 px, but the teacher takes 64×64: set it to that", recipe, *larger)
    refused("task.teacher_model.name is null, expected the name of a model", recipe, "task.teacher_model.name=null")


@pytest.mark.slow
def test_what_a_checkpoint_says_about_its_teacher_is_checked(run, tmp_path):
    stored = content(run)
    stored["linvit"]["recipe"]["task"]["teacher_model"] = {**BASE, "embed_dim": 2**40}
    torch.save(stored, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=re.escape("teacher_model.embed_dim 1099511627776, more than its weights")):
        linvit.load_run(tmp_path / "last.ckpt")

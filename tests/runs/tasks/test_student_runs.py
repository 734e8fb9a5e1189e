"""Students that learn from the networks that they were made from: train, resume, evaluate, predict, report."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tiers import quick
from tiny_run import ONE_STEP, check_halves_make_a_batch, check_resumes_bit_for_bit, content
from tiny_students import BASE, STUDENT, refused, write_student_recipe

import linvit
from linvit.data.images.small import DIGITS_MEAN as MEAN
from linvit.data.images.small import DIGITS_STD as STD
from linvit.runs.training import train_folder
from linvit.studies import compare
from linvit.studies.comparison import Candidate, Cell

TASKS = ("alignment", "transfer")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    recipe = write_student_recipe(tmp_path_factory.mktemp("teacher"), "classification", optimizer={"lr": 3e-3})
    return train_folder(recipe, {"trainer.max_epochs": 6, "trainer.limit_train_batches": 20})


@pytest.fixture(scope="module")
def runs(teacher, tmp_path_factory):
    return {
        task: train_folder(write_student_recipe(tmp_path_factory.mktemp(task), task, task={"teacher": str(teacher)}))
        for task in TASKS
    }


@pytest.mark.parametrize("task", quick(TASKS, ["transfer"]))
@pytest.mark.parametrize("step", quick([1, 3, 5], [5]), ids=["in the first epoch", "at a start", "in the second epoch"])
def test_a_killed_run_resumes_bit_for_bit(task, step, teacher, runs, tmp_path):
    recipe = write_student_recipe(tmp_path, task, task={"teacher": str(teacher)})
    check_resumes_bit_for_bit(recipe, runs[task], step, fewest=100)


@pytest.mark.slow
def test_accumulating_halves_of_a_batch_is_the_whole_batch(teacher, tmp_path):
    """As two processes share a batch."""
    check_halves_make_a_batch(
        write_student_recipe, tmp_path, half=16, rtol=1e-10, atol=1e-12, task={"teacher": str(teacher)}
    )


@pytest.mark.parametrize("task", quick(TASKS, ["alignment"]))
def test_the_accuracy_is_that_of_the_students_own_classifier(task, runs):
    run = linvit.load_run(runs[task])
    network = run.network.eval()
    with torch.no_grad():
        right = [network(images).argmax(1) == labels for images, labels in run.source().val_dataloader()]
    assert run.evaluate()["top1"] == pytest.approx(torch.cat(right).double().mean().item())


@pytest.mark.slow
@pytest.mark.parametrize("task", quick(TASKS, ["alignment"]))
def test_a_run_needs_its_teachers_file_no_more(task, teacher, tmp_path):
    elsewhere = tmp_path / "teacher"
    shutil.copytree(teacher, elsewhere)
    recipe = write_student_recipe(tmp_path, task, task={"teacher": str(elsewhere)}, trainer={"limit_val_batches": 1.0})
    run = linvit.train(recipe)
    shutil.rmtree(elsewhere)
    again = linvit.load_run(run.folder)
    assert again.evaluate()["error"] == pytest.approx(run.history[-1]["error"], rel=1e-5)
    original, network = linvit.load_run(teacher).network, again.network
    weights = original.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.task.original.state_dict().items())
    assert torch.equal(network.head.weight, original.head.weight)
    assert torch.equal(network.pos_embed, original.pos_embed) == (task == "alignment")
    assert not torch.equal(network.blocks[0].attn.qkv.weight, original.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("task", quick(TASKS, ["transfer"]))
def test_a_loaded_run_predicts_and_reports(task, runs, tmp_path):
    run = linvit.load_run(runs[task])
    rows = run.predict([np.zeros((40, 40), np.uint8)], topk=3)
    assert len(rows[0].classes) == 3
    assert set(rows[0].classes) <= set("0123456789")
    page = run.report(tmp_path / "page.html").read_text()
    assert "Relative error per" in page
    assert ("blocks.1.attn" if task == "alignment" else "last") in page
    assert "made from deit_tiny_patch16_224, mala, pattern L" in page


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_loaded_run_is_exported_and_analyzed(task, runs, tmp_path):
    run = linvit.load_run(runs[task])
    assert run.export(tmp_path / "network.onnx", dynamic=False).path.is_file()
    assert run.analyze("rank", output=tmp_path / "analysis").page.is_file()


def test_a_tuned_network_starts_from_a_transferred_one_and_that_from_an_aligned_one(runs, teacher, tmp_path):
    common = {"trainer": {"max_epochs": 1}, "optimizer": {"lr": 1e-8}, "schedule": {"min_lr": 0.0}}
    recipe = write_student_recipe(
        tmp_path / "a", "transfer", init=str(runs["alignment"]), task={"teacher": str(teacher)}, **common
    )
    aligned = linvit.load_run(runs["alignment"]).network
    for made in (
        linvit.train(recipe).network,
        linvit.train(
            write_student_recipe(tmp_path / "b", "classification", model=STUDENT, init=str(runs["alignment"]), **common)
        ).network,
    ):
        for name, value in made.state_dict().items():
            torch.testing.assert_close(value, aligned.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("copied", ["all", "attention", "feed_forward", "nothing"])
def test_a_classifier_starts_from_the_chosen_weights_of_the_softmax_network(copied, teacher, tmp_path):
    recipe = write_student_recipe(
        tmp_path,
        "classification",
        model=STUDENT,
        task={"copied": copied},
        init=str(teacher),
        optimizer={"lr": 1e-9},
        schedule={"min_lr": 0.0},
        trainer=ONE_STEP,
    )
    network, original = linvit.train(recipe).network, linvit.load_run(teacher).network.state_dict()
    for name, value in network.state_dict().items():
        kind = "attention" if ".attn." in name else "feed_forward"
        if name in original and value.std() > 0:
            close = torch.allclose(value, original[name], rtol=0, atol=1e-6)
            assert close == (copied in ("all", kind)), name


@pytest.mark.slow
def test_matching_maps_trains_queries_and_keys_alone(teacher, tmp_path):
    recipe = write_student_recipe(tmp_path, task={"teacher": str(teacher), "match": "maps"}, trainer={"max_epochs": 4})
    run = linvit.train(recipe)
    errors = [row["error"] for row in run.history]
    assert errors == sorted(errors, reverse=True)
    original, network = linvit.load_run(teacher).network, run.network
    for block, theirs in zip(network.blocks, original.blocks, strict=True):
        query, key, value = block.attn.qkv.weight.chunk(3)
        before = theirs.attn.qkv.weight.chunk(3)
        assert not torch.equal(query, before[0])
        assert not torch.equal(key, before[1])
        assert torch.equal(value, before[2])
        assert torch.equal(block.attn.proj.weight, theirs.attn.proj.weight)
    assert linvit.load_run(run.folder).evaluate()["error"] < errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.parametrize("task", TASKS)
def test_other_precisions(task, precision, teacher, tmp_path):
    recipe = write_student_recipe(
        tmp_path, task, task={"teacher": str(teacher)}, trainer={"precision": precision, "max_epochs": 3}
    )
    errors = [row["error"] for row in linvit.train(recipe).history]
    assert errors[-1] < errors[0]


def test_features_that_a_frozen_head_reads(teacher, tmp_path):
    recipe = write_student_recipe(tmp_path, "transfer", task={"teacher": str(teacher), "features": [0, -1]})
    run = linvit.load_run(train_folder(recipe))
    assert run.task.names == ["0", "-1"]
    maps = run.task.described(run.network, torch.zeros(1, 3, 32, 32))
    assert [tuple(y.shape) for y in maps] == [(1, 16, 4, 4)] * 2
    assert torch.equal(run.network.norm.weight, linvit.load_run(teacher).network.norm.weight)  # after the maps
    measured = run.evaluate()
    assert measured["worst"] >= measured["error"] > 0


@pytest.fixture
def photos(tmp_path):
    for number in range(20):
        path = tmp_path / "photos" / f"{number % 3}" / "deeper" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def test_images_without_labels_and_a_network_without_classifier(photos, tmp_path):
    recipe = write_student_recipe(tmp_path, model={"num_classes": 0}, trainer={"limit_val_batches": 1.0})
    data = f"data={{name: images, root: {photos}, size: 32, batch_size: 4, held_out: 0.2, num_workers: 0}}"
    run = linvit.train(recipe, ["data=null", data])
    assert run.class_names == []
    assert run.history[-1]["images"] == 4
    loaded = linvit.load_run(run.folder)
    assert loaded.evaluate()["error"] == pytest.approx(run.history[-1]["error"], rel=1e-5)
    with pytest.raises(ValueError, match="has no classifier, so it cannot predict: train one from it"):
        loaded.predict(photos)
    other = linvit.train(recipe, ["data=null", data, "model.num_classes=7"], folder=tmp_path / "numbered")
    assert set(other.predict(photos, topk=7)[0].classes) == set("0123456")


@pytest.mark.slow
def test_other_sizes_than_the_teachers(teacher, tmp_path):
    dynamic = {**STUDENT, "base": {**BASE, "dynamic_img_size": True}}
    recipe = write_student_recipe(
        tmp_path, model=dynamic, task={"teacher": str(teacher)}, data={"size": 48}, trainer={"max_epochs": 3}
    )
    errors = [row["error"] for row in linvit.train(recipe).history]
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("task", quick(TASKS, ["alignment"]))
def test_one_sentence_for_each_mistake(task, teacher, photos, tmp_path):
    recipe = write_student_recipe(tmp_path, task, task={"teacher": str(teacher)})
    other = {
        "alignment": r"model\.name is 'resnet10t', expected 'linearized'",
        "transfer": r"task\.teacher_model is null",
    }
    refused(other[task], recipe, "model=null", "model={name: resnet10t}")
    plain = write_student_recipe(tmp_path / "plain", task, model={"base": {"name": "resnet10t"}})
    refused("resnet10t has no argument 'depht'", plain, "model.base.depht=3")
    refused("model.pattern is 'LLL', expected 2 letters", recipe, "model.pattern=LLL")
    refused("do not fit this VisionTransformer.*patch_embed.proj.weight is not", recipe, "model.base.patch_size=4")
    refused("The checkpoint .*nowhere.*does not exist", recipe, "task.teacher=nowhere", kind=FileNotFoundError)
    (tmp_path / "empty").mkdir()
    about = f"mean: {[MEAN] * 3}, std: {[STD] * 3}"  # the teacher's
    images = f"data={{name: images, num_workers: 0, batch_size: 2, size: 32, {about}, root: "
    refused("head.weight is not: .*for as many classes", recipe, "data=null", f"{images}{photos}}}")
    recipe = write_student_recipe(tmp_path, task, model={"num_classes": 10}, task={"teacher": str(teacher)})
    refused("has no image files in it", recipe, "data=null", f"{images}{tmp_path / 'empty'}}}")
    refused("none of them is held out", recipe, "data=null", f"{images}{photos}, held_out: 0}}")


def test_one_sentence_for_mistakes_of_one_task(teacher, tmp_path):
    recipe = write_student_recipe(tmp_path / "a", task={"teacher": str(teacher)})
    refused("kept softmax attention in all blocks: set an L in its `pattern`", recipe, "model.pattern=SS")
    refused("task.compile is true, but each block", recipe, "task.compile=true")
    recipe = write_student_recipe(tmp_path / "t", "transfer", task={"teacher": str(teacher)})
    refused(r"task.features is \[2\], expected numbers from -2 to 1", recipe, "task.features=[2]")


def test_an_alignment_does_not_start_from_that_of_another_teacher(runs, teacher, tmp_path):
    recipe = write_student_recipe(tmp_path, init=str(runs["alignment"]))
    refused("have another .* than the teacher: start from an alignment with the same", recipe)
    run = linvit.train(recipe, {"task.teacher": str(teacher), "trainer.max_epochs": 1})
    assert run.history[0]["error"] < linvit.load_run(runs["alignment"]).history[0]["error"]


def test_without_a_teacher_it_says_so(tmp_path, caplog):
    train_folder(write_student_recipe(tmp_path, trainer=ONE_STEP))
    assert "There is no `teacher`" in caplog.text


@pytest.mark.slow
def test_students_of_several_mechanisms_are_compared_and_go_on_from_their_own_runs(teacher, tmp_path):
    few = {"trainer": ONE_STEP, "task": {"teacher": str(teacher)}}
    align = write_student_recipe(tmp_path / "align", **few)
    init = str(tmp_path / "aligned/tiny/{model.mechanism}/seed{seed}")
    transfer = write_student_recipe(tmp_path / "transfer", "transfer", **few, init=init)
    both = {"seeds": 1, "over": "model.mechanism=linear,mala", "also": ["top1"]}
    compare([align], tmp_path / "aligned", **both)
    rows = compare([transfer], tmp_path / "transferred", **both).rows
    assert [row.value for row in rows] == ["linear", "mala"]
    assert all(0 < row.mean.mean < 2 and 0 < row.also["top1"].mean < 100 for row in rows)
    shared = {}
    for mechanism in ("linear", "mala"):
        run = content(tmp_path / "transferred" / "tiny" / mechanism / "seed0")
        assert run["linvit"]["recipe"]["init"] == str(tmp_path / "aligned" / "tiny" / mechanism / "seed0")
        shared[mechanism] = run["state_dict"]["network.blocks.0.attn.qkv.weight"]
    assert not shared["linear"].equal(shared["mala"])


@pytest.mark.parametrize("task", quick(TASKS, ["transfer"]))
def test_a_plan_needs_no_weights_of_the_teacher(task, teacher, tmp_path, recwarn):
    recipe = write_student_recipe(tmp_path, task, task={"teacher": str(teacher)})
    network = Candidate.of(Cell(recipe)).task.network
    assert all(parameter.is_meta for parameter in network.parameters())
    assert not recwarn.list

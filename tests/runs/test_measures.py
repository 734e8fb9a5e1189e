"""What a task measures is declared once: lines, curves, checkpoints and comparisons read it there."""

import pytest
from tiers import quick
from tiny_dense import tiny_scenes, write_dense_recipe, write_multilabel_recipe
from tiny_diffusion import write_diffusion_recipe
from tiny_language import write_language_recipe
from tiny_run import write_recipe
from tiny_speech import write_speech_recipe
from tiny_students import write_student_recipe

import linvit
from linvit.analysis.run_figures import training_curve
from linvit.runs.tasks import RUNS
from linvit.tasks import sampling
from linvit.tasks.measures import Measure, column

FEW = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1}


def write_one(task, folder):
    """A recipe of the task that trains in seconds."""
    if task == "recall":
        recipe = folder / "recall.yaml"
        recipe.write_text(
            f"folder: {folder / 'run'}\nmodel: {{name: sequence_nano, width: 16, depth: 1, heads: 2, hidden: 16}}\n"
            "task: {name: recall}\ndata: {name: recall, pairs: 2, keys: 4, values: 4, length: 64, val_length: 16}\n"
            "trainer: {max_epochs: 2, limit_train_batches: 2, accelerator: cpu}\n"
        )
        return recipe
    if task in ("detection", "segmentation"):
        framework = {"detection": "mask_rcnn", "segmentation": "semantic_fpn"}[task]
        return write_dense_recipe(folder, tiny_scenes(folder / "scenes", 4, 2), framework, trainer=FEW)
    if task == "multilabel":
        return write_multilabel_recipe(folder, tiny_scenes(folder / "scenes", 4, 2) / "detection")
    if task in ("alignment", "transfer"):
        return write_student_recipe(folder, task, trainer=FEW)
    writers = {
        "classification": write_recipe,
        "language": write_language_recipe,
        "diffusion": write_diffusion_recipe,
        "speech": write_speech_recipe,
    }
    return writers[task](folder, trainer=FEW)


@pytest.mark.parametrize("task", quick(RUNS, ["recall", "language", "alignment"]))
def test_the_line_of_an_epoch_the_curve_and_the_evaluation_show_what_the_task_declares(
    task, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sampling, "EPOCHS", 1)
    run = linvit.train(write_one(task, tmp_path), progress=True)
    line = capsys.readouterr().out.splitlines()[-1]
    for name in run.task.headline:
        assert run.task.measures[name].heading in line
    assert run.task.score in run.task.headline
    measured = set().union(*run.history) - {"epoch", "step", "train_loss", "lr", "seconds", "val_loss"}
    names = {name.removeprefix("ema_") for name in measured}
    assert names <= set(run.task.measures)
    assert {column(run.task.score), f"ema_{run.task.score}"} & set(run.history[-1])
    figure = training_curve(run.history, run.task.measures)
    shown = {line.get_label() for axes in figure.axes for line in axes.get_lines()}
    drawn_measures = {name for name in names if run.task.measures[name].panel not in (None, "loss")}
    for name in drawn_measures:
        assert any(label.startswith(run.task.measures[name].heading) for label in shown)
    assert all(axes.lines for axes in figure.axes)
    assert set(run.evaluate()) <= set(run.task.measures)
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.parametrize("framework", ["mask_rcnn", "retinanet"])
def test_a_detector_declares_masks_where_it_has_them(framework, tmp_path):
    run = RUNS["detection"]
    heads = {"width": 16} if framework == "retinanet" else {"width": 16, "hidden": 32}
    model = {"framework": framework, "backbone": "mavit_nano", "heads": heads}
    task = run.create_task(run.create_network(model, 3, 3), 3)
    assert ("mask_ap" in task.measures) == (framework == "mask_rcnn")
    assert task.score in task.measures


@pytest.mark.parametrize(
    ("measure", "value", "cell"),
    [
        (Measure("top-1"), 0.91239, "91.24 %"),
        (Measure("loss", "number"), 0.123456, "0.1235"),
        (Measure("images", "count"), 12345, "12,345"),
    ],
)
def test_cells_have_their_unit(measure, value, cell):
    assert measure.cell(value) == cell

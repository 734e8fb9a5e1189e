"""What a user can get wrong: each ends in one clear sentence on stderr, exit code 2 and no traceback."""

import pickle

import pytest
import timm
import torch
from PIL import Image
from tiny_run import write_recipe

from linvit_cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    assert main(["train", str(write_recipe(folder)), "trainer.max_epochs=1"]) == 0
    return folder / "run"


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused and returns the sentence."""

    def command(*arguments, lists=False):
        assert main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        lines = [line for line in said.strip().splitlines() if not line.startswith(("Training ", "Starting "))]
        assert lines[0].startswith("linvit: ")
        assert lists or len(lines) == 1, said
        return said

    return command


def test_a_report_that_cannot_be_written_is_refused_before_the_evaluation(refused, run, tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.runs.ClassificationRun.evaluate", lambda *_, **__: pytest.fail("evaluated"))
    assert f"{tmp_path} is a folder, not a file" in refused("eval", run, "--report", tmp_path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.limit_val_batches=0.0001", "Lightning's trainer refuses the recipe's group trainer"),
        ("trainer.log_every_n_steps=0", "trainer.log_every_n_steps is 0, expected"),
        ("model.features_only=true", "cannot be created with model.features_only"),
        ("model.name=ravlt_nanno", "Unknown model 'ravlt_nanno': did you mean 'ravlt_nano'?"),
        ("model.name=''", "model.name is '', expected the name of a model"),
        ("model={name: deit_tiny_mala, mechanism: rala}", "model.mechanism is set by deit_tiny_mala itself: leave"),
        ("model.drop_pth_rate=0.1", "ravlt_nano has no argument 'drop_pth_rate': did you mean model.drop_path_rate?"),
        ("task.lable_smoothing=0.1", "Did you mean 'task.label_smoothing'?"),
        ("optimiser.lr=1e-3", "Did you mean 'optimizer'?"),
        ("lr=1e-3", "Did you mean 'optimizer.lr'?"),
        ("data.name=digit", "Did you mean 'digits'?"),
        ("data.channels=4", "data.channels is 4"),
        ("data.size=[1", "data.size"),
        ("optimizer=3", "optimizer"),
        ("data.size=16", "data.size is 16, expected a whole number from 32 to 16,384, because networks halve an image"),
        ("--trainer.max_epochs", "'trainer.max_epochs' has no value"),
        ("model.in_chans=1", "model.in_chans is 1 but the data has 3"),
        ("model.num_classes=7", "model.num_classes is 7 but the data has 10"),
    ],
)
def test_settings_that_training_cannot_use(refused, tmp_path, setting, words):
    assert words in refused("train", write_recipe(tmp_path), setting)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the GPU that the machine lacks")
def test_a_trainer_that_cannot_be(refused, tmp_path):
    assert "requires a GPU" in refused("train", write_recipe(tmp_path), "trainer.strategy=fsdp")


def test_missing_and_broken_recipe(refused, tmp_path):
    assert f"no recipe at {tmp_path / 'none.yaml'}" in refused("train", tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("model: {name: [")
    assert "not valid YAML" in refused("train", tmp_path / "broken.yaml")


@pytest.mark.parametrize("command", [["train"], ["eval"], ["analyze"], ["data", "check"]])
def test_a_path_that_is_too_long(refused, command):
    assert "xx cannot be used (File name too long): check the path" in refused(*command, "x" * 300)


def test_no_model(refused, tmp_path):
    (tmp_path / "empty.yaml").write_text("data: {name: digits}\n")
    assert "model.name is null, expected the name of a model: set it to" in refused(
        "train", tmp_path / "empty.yaml", f"folder={tmp_path / 'run'}"
    )


def folder_recipe(tmp_path):
    path = tmp_path / "folder.yaml"
    path.write_text(
        f"model: {{name: ravlt_nano}}\ndata: {{name: imagefolder, root: {tmp_path / 'data'}, size: 32, batch_size: 2,"
        f" num_workers: 0}}\ntrainer: {{max_epochs: 1, accelerator: cpu}}\nfolder: {tmp_path / 'run'}\n"
    )
    return path


@pytest.fixture
def images(tmp_path):
    """Two classes, train and val, of pictures in every mode; data.root of folder_recipe."""
    for part in ("train", "val"):
        for name in ("ant", "zebra"):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for mode in ("L", "RGBA", "P"):
                Image.linear_gradient("L").resize((60, 40)).convert(mode).save(folder / f"{mode}.png")
    return tmp_path / "data"


def test_missing_data_folder(refused, tmp_path):
    assert f"The data folder {tmp_path / 'data'} does not exist" in refused("train", folder_recipe(tmp_path))


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_image_stops_training_with_its_name(refused, tmp_path, images, workers):
    (images / "train" / "ant" / "L.png").write_bytes(b"broken")
    said = refused("train", folder_recipe(tmp_path), f"data.num_workers={workers}", "data.batch_size=6")
    assert f"{images / 'train' / 'ant' / 'L.png'} is not a readable image" in said


def test_corrupt_images_are_left_out_up_to_the_limit_of_the_recipe_and_modes_converted(tmp_path, images, capsys):
    (images / "train" / "ant" / "L.png").write_bytes(b"broken")
    (images / "val" / "ant" / "L.png").write_bytes(b"broken")
    assert main(["train", str(folder_recipe(tmp_path)), "data.max_corrupt=1", "data.batch_size=6"]) == 0
    assert capsys.readouterr().err.count("Left out (1 of at most 1): ") == 2


def test_a_checkpoint_of_another_model(refused, run, tmp_path):
    torch.save(timm.create_model("mavit_nano", num_classes=10).state_dict(), tmp_path / "mavit.pth")
    said = refused("eval", "--model", "care_nano", "--checkpoint", tmp_path / "mavit.pth", "data=digits", lists=True)
    assert "does not fit" in said
    assert len(said.splitlines()) < 12
    said = refused("train", run / "recipe.yaml", "--resume", "model.name=mavit_nano", "trainer.max_epochs=2")
    assert "has model.name 'ravlt_nano', but the recipe says 'mavit_nano'" in said


def test_a_truncated_checkpoint(refused, run, tmp_path):
    path = tmp_path / "cut.ckpt"
    path.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:100_000])
    for command in (
        ["eval", path],
        ["predict", path, tmp_path],
        ["eval", "--model", "ravlt_nano", "--checkpoint", path],
    ):
        assert "truncated" in refused(*command)


class Bomb:
    def __init__(self, fuse):
        self.fuse = fuse

    def __reduce__(self):
        return open, (str(self.fuse), "w")


def test_a_pickle_that_would_execute_code(refused, run, tmp_path):
    path, fuse = tmp_path / "bomb.ckpt", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"state_dict": Bomb(fuse)}))
    assert "could execute code" in refused("eval", path)
    assert "execute code" in refused("eval", "--model", "ravlt_nano", "--checkpoint", path)
    assert not fuse.exists()


def test_a_pickle_in_the_place_of_the_last_checkpoint(refused, tmp_path):
    recipe = write_recipe(tmp_path)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.write_bytes(pickle.dumps({"state_dict": Bomb(tmp_path / "ran")}))
    assert "could execute code" in refused("train", recipe, "--resume")
    assert not (tmp_path / "ran").exists()


def test_a_loss_that_turns_nan(refused, tmp_path):
    said = refused("train", write_recipe(tmp_path), "optimizer.lr=1e15", "schedule.warmup_lr=1e15")
    assert "training stopped" in said or "no longer finite" in said
    assert not list((tmp_path / "run").rglob("*.ckpt"))


def test_a_folder_that_is_in_use(refused, run):
    said = refused("train", run / "recipe.yaml")
    assert "is not empty: continue with --resume, or choose another with folder=…." in said


def test_nothing_to_measure_on_or_with(refused, run, tmp_path):
    torch.save(timm.create_model("ravlt_nano", num_classes=10).state_dict(), tmp_path / "nano.pth")
    given = ["--model", "ravlt_nano", "--checkpoint", tmp_path / "nano.pth"]
    assert "set data to a folder, or to a name such as digits." in refused("eval", *given)
    assert "Nothing to load" in refused("eval")
    assert "Give either a run or --model with --checkpoint, not both" in refused("eval", run, *given)
    assert "--model needs --checkpoint" in refused("eval", "--model", "ravlt_nano")
    said = refused("eval", run.parent / f"{run.name}s")
    assert "No run or checkpoint was found at" in said
    assert f"pass a run's folder or a checkpoint file. Did you mean {run.name!r}?" in said
    assert f"The folder {tmp_path} has no checkpoints/" in refused("eval", tmp_path)
    assert "Unknown model" in refused("eval", "--model", "ravlt_nanno", "--checkpoint", tmp_path / "nano.pth")
    assert "does not say which model" in refused("eval", tmp_path / "nano.pth")


def test_classes_of_other_data(refused, run, images):
    assert "The data has the class 'ant', but the network knows 0, 1, 2" in refused("eval", run, f"data={images}")


def test_nothing_to_predict(refused, run, tmp_path):
    assert "nothing to predict" in refused("predict", run)
    assert "no image file or folder at" in refused("predict", run, tmp_path / "none.png")
    assert "contains no image files" in refused("predict", run, tmp_path)
    assert "expected a .csv or .json file" in refused("predict", run, tmp_path, "--output", "table.xls")


def test_convert_and_models(refused, tmp_path):
    assert "does not exist" in refused(
        "convert", tmp_path / "no.pth", tmp_path / "o.safetensors", "--model", "ravlt_nano"
    )
    said = refused("models", "--family", "swin")
    assert "--family is 'swin', expected one of care, deit_small, deit_tiny, hvittt, " in said


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(ValueError, match="no recipe at"):
        main(["train", str(tmp_path / "none.yaml"), "--debug"])

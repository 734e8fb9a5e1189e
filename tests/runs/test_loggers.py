"""Weights & Biases and MLflow as loggers of a recipe: offline by default, and never with paths of the machine."""

import sqlite3

import pytest
from lightning.pytorch import loggers
from tiny_run import ONE_STEP, TINY, write_recipe

from linvit.runs.recipe import Recipe
from linvit.runs.training import train_folder

WANDB = {"class_path": "WandbLogger", "init_args": {"project": "digits", "offline": True}}
MLFLOW = {"class_path": "MLFlowLogger", "init_args": {"experiment_name": "digits"}}


def train_with(folder, logger):
    return train_folder(write_recipe(folder, trainer={**ONE_STEP, "logger": logger}))


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """Neither package reports its use; what they write next to the run would show in tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)


def test_weights_and_biases_writes_into_the_folder(tmp_path):
    wandb = pytest.importorskip("wandb", reason="not installed by any extra")
    run = train_with(tmp_path, WANDB)
    config = dict(wandb.run.config)
    wandb.finish()
    assert config["model"]["name"] == "ravlt_nano"
    assert "folder" not in config
    (stored,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert b"val/top1" in content
    assert {path.name for path in tmp_path.iterdir()} == {"run", "tiny.yaml"}


def test_mlflow_writes_into_the_folder(tmp_path):
    pytest.importorskip("mlflow", reason="not installed by any extra")
    run = train_with(tmp_path, [MLFLOW])
    with sqlite3.connect(run / "mlflow.db") as database:
        parameters = dict(database.execute("select key, value from params"))
        measures = {key for (key,) in database.execute("select key from metrics")}
    assert parameters["model/name"] == "ravlt_nano"
    assert not any(str(tmp_path) in value for value in parameters.values())
    assert {"train/loss", "val/top1", "lr"} <= measures
    assert {path.name for path in tmp_path.iterdir()} == {"run", "tiny.yaml"}


@pytest.mark.parametrize(("logger", "package"), [(WANDB, "wandb"), (MLFLOW, "mlflow")])
def test_a_missing_package_is_named_and_no_folder_left(tmp_path, monkeypatch, logger, package):
    module = getattr(loggers, package)
    monkeypatch.setattr(module, f"_{package.upper()}_AVAILABLE", Missing(f"Requirement {package} not met"))
    with pytest.raises(ValueError, match=rf"trainer\.logger: \w+ needs a package .* \(Requirement {package} not met\)"):
        train_with(tmp_path, logger)
    assert not (tmp_path / "run").exists()


class Missing(str):
    def __bool__(self):
        return False


@pytest.mark.parametrize(
    ("logger", "advice"),
    [
        ({"class_path": "WandbLogger"}, "set offline: true"),
        ({"class_path": "WandbLogger", "init_args": {"offline": False}}, "set offline: true"),
        ({"class_path": "WandbLogger", "init_args": {"offline": True, "mode": "online"}}, "set offline: true"),
        ({"class_path": "WandbLogger", "init_args": {"offline": True, "settings": {"mode": "online"}}}, "offline"),
        ({"class_path": "MLFlowLogger", "init_args": {"tracking_uri": "databricks"}}, "trust_recipe=True"),
        ({"class_path": "MLFlowLogger", "init_args": {"artifact_location": "here"}}, "trust_recipe=True"),
        ({"class_path": "CometLogger"}, "trust_recipe=True"),
    ],
    ids=str,
)
def test_what_may_send_measures_needs_trust(logger, advice):
    values = {**TINY, "trainer": {"logger": logger}}
    with pytest.raises(ValueError, match=f"may send measures to a server: .*{advice}"):
        Recipe(values)


class Failing(loggers.CSVLogger):
    def log_hyperparams(self, params=None):
        raise RuntimeError("no account")


def test_a_logger_that_cannot_start_is_one_sentence(tmp_path):
    recipe = write_recipe(tmp_path, trainer={"logger": {"class_path": f"{__name__}.Failing"}})
    with pytest.raises(ValueError, match=r"^`logger`: Failing cannot start \(no account\)\.$"):
        train_folder(recipe, trust_recipe=True)

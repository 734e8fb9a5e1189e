"""Recipes that somebody else wrote: no code of theirs runs, nothing is written elsewhere, every YAML ends in time."""

import os
import re
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, Timer
from tiny_run import write_recipe

from linvit.models.by_name import check_model, create_classifier
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import dump_yaml, load_yaml, merge, parsed_override, read_recipe
from linvit.runs.training import train_folder

VALUES = {"model": {"name": "ravlt_nano"}, "data": {"name": "digits"}, "folder": "runs/x"}
RAW = re.compile(r"Parser key|Union|subtypes|ArgumentError|typing\.|<class|collections\.abc|\bNone\b")
EVIL = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
from lightning.pytorch.callbacks import Callback
class Mine(Callback): pass
def function(*arguments, **more): raise SystemExit
"""
OBJECTS = {"accelerator", "callbacks", "logger", "plugins", "profiler", "strategy"}


def refusal(values, **options):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        Recipe(merge(VALUES, values), **options)
    assert not RAW.search(str(caught.value)), caught.value
    return str(caught.value)


def sentence_of(call, *arguments):
    """What a call refuses with; empty where it takes its arguments."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "evil_module.ran"
    sys.modules.pop("evil_module", None)


@pytest.mark.parametrize("key", sorted(OBJECTS))
def test_foreign_code_is_not_imported(key, evil):
    named = {"class_path": "evil_module.Mine"}
    for value in ("evil_module.Mine", named, [named], ["evil_module.Mine"], {**named, "init_args": {"a": 1}}):
        assert re.search(r"`trust_recipe=True`|expected", refusal({"trainer": {key: value}}))
    hidden = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": named}}
    refusal({"trainer": {key: hidden}})
    assert not evil.exists()


def test_functions_are_not_taken_from_text(evil):
    for path in ("evil_module.function", "os.system"):
        init_args = {"on_fit_start": path}
        said = refusal({"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": init_args}]}})
        assert "on_fit_start" in said
        assert "expected a function" in said
    assert not evil.exists()


@pytest.mark.parametrize(
    "path",
    ["torch.load", "torch.hub.load", "torch.nn.Linear", "lightning.pytorch.Trainer", "lightning.pytorch.loggers.Logger",
     "lightning.pytorch.callbacks.Callback", "lightning.pytorch.callbacks.os.system", "timm.create_model",
     "torch.utils.__main__.x", "lightning.fabric.__main__.x", "torch._dynamo.config", "..x", "x y.z", "a" * 5000, ""],
)  # fmt: skip
def test_what_is_no_callback_is_not_created(path):
    refusal({"trainer": {"callbacks": [{"class_path": path}]}})


def test_a_trusted_recipe_may_name_any_class(evil):
    recipe = Recipe(merge(VALUES, {"trainer": {"callbacks": ["evil_module.Mine"]}}), trust=True)
    assert type(recipe.trainer(logger=False).callbacks[0]).__name__ == "Mine"
    assert evil.exists()


@pytest.mark.parametrize("place", ["/tmp/x", "../x", "a/../../x", "~/x", "$HOME/x", "s3://x/y", "C:\\x", "\\\\host\\x"])
@pytest.mark.parametrize("key", ["dirpath", "filename"])
def test_nothing_is_written_outside_of_the_folder(key, place):
    profiler = {"class_path": "lightning.pytorch.profilers.SimpleProfiler", "init_args": {key: place}}
    assert "outside the run's folder" in refusal({"trainer": {"profiler": profiler}})


def test_lightnings_own_objects_write_into_the_folder(tmp_path):
    objects = {
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:00:30:00"}}],
        "logger": {"class_path": "CSVLogger"},
        "profiler": {"class_path": "SimpleProfiler", "init_args": {"dirpath": "times", "filename": "all"}},
    }
    run = train_folder(write_recipe(tmp_path, trainer={**objects, "max_epochs": 1, "limit_train_batches": 1}))
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    assert {"times/fit-all.txt", "lightning_logs/version_0/metrics.csv", "checkpoints/last.ckpt"} <= names
    assert {path.name for path in tmp_path.iterdir()} == {"run", "tiny.yaml"}
    assert Recipe(read_recipe(run / "recipe.yaml")).resolved() == yaml.safe_load((run / "recipe.yaml").read_text())


def test_objects_are_created_with_their_arguments():
    trainer = {"callbacks": ["Timer", {"class_path": "EarlyStopping", "init_args": {"monitor": "top1", "patience": 7}}]}
    timer, stopping = Recipe(merge(VALUES, {"trainer": trainer})).trainer(logger=False).callbacks[:2]
    assert isinstance(timer, Timer)
    assert isinstance(stopping, EarlyStopping)
    assert (stopping.monitor, stopping.patience) == ("top1", 7)


@pytest.mark.parametrize(
    ("init_args", "sentence"),
    [
        ({"monitor": "top1", "patiens": 3}, "Did you mean 'patience'?"),
        ({"monitor": "top1", "patience": "x"}, "patience is 'x', expected a whole number"),
        ({}, "EarlyStopping needs monitor"),
        ([1], "init_args is [1], expected a mapping"),
    ],
)
def test_arguments_of_objects_are_checked(init_args, sentence):
    stopping = {"class_path": "EarlyStopping", "init_args": init_args}
    assert sentence in refusal({"trainer": {"callbacks": stopping}})


@pytest.mark.parametrize("name", ["hf-hub:timm/vit_tiny", "hf_hub:x", "local-dir:/tmp", "timm:x", 3, None, ["x"]])
def test_models_are_not_fetched_by_their_name(name):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        check_model(name)
    if name:
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            create_classifier({"name": name}, 10, 3)


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "\n".join(
    f"{above}: &{above} [{','.join(9 * [f'*{below}'])}]" for below, above in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BOMB, "a value with an alias in it"),
        ("a: &x [*x]", "*x refers to a value with an alias in it"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("seed: 1\nseed: 2", "line 2, column 1: the key seed is given twice"),
        ("model: {1: x}", "the key 1 is not text, put it in quotes"),
        ("? [a, b]\n: 1", "a key is a list or a mapping"),
        ("a:\n\tb: 1", "line 2, column 1: found character"),
        ("a: !!python/object:os.system x", "the tag !!python/object:os.system is not supported"),
        ("a: " + "9" * 5000, "a number has too many digits"),
        ("3", "contains no `key: value` pairs"),
        ("base: 3", "The `base` of the recipe"),
        ("a: \x00", "has NUL characters"),
    ],
)
def test_broken_yaml_is_one_sentence(text, sentence, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        read_recipe(path)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_other_encodings_are_named(encoding, tmp_path):
    (tmp_path / "r.yaml").write_bytes("folder: größe".encode(encoding))
    with pytest.raises(ValueError, match=r"is not text in UTF-8: save it again as UTF-8"):
        read_recipe(tmp_path / "r.yaml")


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "r.yaml").write_text("folder: größe", encoding="utf-8-sig")
    assert read_recipe(tmp_path / "r.yaml")["folder"] == "größe"


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_text("#" * 2**21)
    for name, words in (("fifo.yaml", "no recipe at"), ("", "is a folder"), ("large.yaml", "larger than 1,024 KiB")):
        with pytest.raises(ValueError, match=words):
            read_recipe(tmp_path / name)


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(st.text(max_size=40))
def test_any_text_is_a_value_or_one_sentence(text):
    for read in (load_yaml, lambda text: parsed_override(f"data.root={text}")):
        assert re.fullmatch(r"[^\n]*", sentence_of(read, text))


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=0x2FFF, categories=("L", "N")), min_size=1, max_size=9))
def test_a_hash_begins_no_comment_in_an_override(word):
    assert parsed_override(f"data.root=my {word} #1/x")[1] == f"my {word} #1/x"


@pytest.mark.parametrize("value", [{1: "x"}, {"a": {2: 3}}, b"x"])
def test_python_callers_give_plain_values(value):
    for values in ({"model": {"name": "ravlt_nano", "options": value}}, {"optimizer": {"options": value}}):
        assert re.search("expected", refusal(values))


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(
    st.sampled_from(sorted(Recipe(VALUES).values["trainer"])),
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=5)
    | st.lists(st.integers(0, 2), max_size=2) | st.dictionaries(st.text(max_size=3), st.just(1), max_size=1),
)  # fmt: skip
def test_any_value_of_the_trainer_is_taken_or_named(key, value):
    said = sentence_of(Recipe, merge(VALUES, {"trainer": {key: value}}))
    assert re.fullmatch(r"([^\n]*trainer\.[^\n]+)?", said)
    assert not RAW.search(said.replace(repr(value), ""))


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"devices": 9999}, "trainer.devices is 9999, expected at most"),
        ({"num_nodes": 5}, "trainer.num_nodes is 5, but nothing started this process on several machines"),
        ({"accelerator": "tpu"}, "trainer.accelerator is 'tpu', expected one that this machine has"),
    ],
)
def test_what_the_machine_does_not_have(trainer, sentence):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        Recipe(merge(VALUES, {"trainer": {"accelerator": "cpu"} | trainer})).check_machine()
    assert sentence in str(caught.value)


def test_images_are_not_augmented_on_a_device_without_float64(monkeypatch):
    recipe = Recipe(merge(VALUES, {"data": {"name": "cifar", "root": "x", "augment_on": "device"}}))
    recipe.check_machine()
    monkeypatch.setattr("linvit.runs.trainer.present_device", lambda accelerator: "mps")
    with pytest.raises(ValueError, match=r"data.augment_on is 'device', which needs float64, .*: set it to cpu"):
        recipe.check_machine()


def test_keys_of_a_merged_mapping_may_be_overridden(tmp_path):
    (tmp_path / "r.yaml").write_text("task: &a {<<: {x: 1}, x: 2}\ndata: {<<: *a, y: 3}\n")
    values = read_recipe(tmp_path / "r.yaml")
    assert (values["task"], values["data"]) == ({"x": 2}, {"x": 2, "y": 3})


@pytest.mark.parametrize(
    "text", ["1e-3", "1e5", "-.5", "0o17", "1_000", ".inf", "null", "on", "12:30", "# x", "a: b", "ü"]
)
def test_what_is_written_is_read_again(text):
    values = {"folder": text, "values": [text, 1e-3, 1e5, None, True]}
    assert load_yaml(dump_yaml(values)) == values


@pytest.mark.parametrize("value", [float("nan"), 2**60])
def test_numbers_that_no_checkpoint_can_hold_are_refused_before_training(value):
    with pytest.raises(ValueError, match=r"model\.options\.x is .*, expected a number from -2\^53 to 2\^53: change it"):
        Recipe(merge(VALUES, {"model": {"options": {"x": [value]}}}))

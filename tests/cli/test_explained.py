"""Every class of error that a mistake can raise ends in one sentence; the rest is a bug and says so."""

import argparse
import pickle

import pytest
import torch
import yaml

from linvit.errors import SettingError, keys_of, refuse
from linvit_cli import failures
from linvit_cli.failures import BUG, STOPPED, WRONG_USE, explain, say_unreadable


def options(command="eval", takes_overrides=False, overrides=(), **flags):
    return argparse.Namespace(
        command=command, takes_overrides=takes_overrides, overrides=overrides, flags=flags, debug=False
    )


def raised(function, *arguments):
    with pytest.raises(Exception) as error:  # noqa: PT011
        function(*arguments)
    return error.value


MISTAKES = [
    ValueError("nothing to load"),
    SettingError.of("topk", 0, "a whole number of 1 or more"),
    OSError("disk full"),
    FileNotFoundError(2, "No such file", "x"),
    FloatingPointError("loss is NaN"),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    OverflowError("int too large to convert to float"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("This needs espeak-ng: install it."),
    ModuleNotFoundError("No module named 'jiwer'", name="jiwer"),
    ModuleNotFoundError("TensorBoard is not installed:\ninstall it."),
    RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed."),
    RuntimeError("operator torchvision::nms does not exist"),
    RuntimeError("Too many open files. Communication with the workers is no longer possible."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nsecond line"),
    raised(torch.empty, 10**15),
    raised(torch.empty, 2**40, 2**40),
    raised(yaml.safe_load, "a: [1"),
]


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: type(error).__name__)
def test_a_mistake_is_one_sentence(error, capsys):
    assert explain(error, options(topk="--topk")) == WRONG_USE
    said = capsys.readouterr().err
    assert said.startswith("linvit: ")
    assert len(said.splitlines()) == 1
    assert len(said) > len("linvit: \n")


@pytest.mark.parametrize("error", [AttributeError("x"), KeyError("x"), TypeError("unhashable"), RuntimeError("shape")])
def test_a_bug_keeps_its_traceback_after_one_sentence(error, capsys):
    def fails():
        raise error

    assert explain(raised(fails), options()) == BUG
    first, *traceback = capsys.readouterr().err.splitlines()
    assert first.startswith("linvit: This is a bug in linvit. Please report it")
    assert traceback[0].startswith("Traceback")
    assert type(error).__name__ in traceback[-1]


def test_a_long_list_of_files_is_cut(capsys):
    assert say_unreadable([f"{number}.png is damaged" for number in range(100)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (21, "linvit: 80 more files cannot be used.")


def test_a_stopped_run_is_no_mistake(capsys):
    stopped = type("RunStoppedError", (Exception,), {})("Stopped after 3 epochs: continue with `resume=True`.")
    assert explain(stopped, options("train")) == STOPPED
    assert capsys.readouterr().err == "Stopped after 3 epochs: continue with --resume.\n"


def test_a_true_or_false_value_is_a_flag_alone(capsys):
    explain(ValueError("It has one size: set `dynamic=False`."), options("export", dynamic="--fixed"))
    assert capsys.readouterr().err == "linvit: It has one size: set --fixed.\n"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("lightning.pytorch", "train"),
        ("sklearn.metrics", "train"),
        ("faster_coco_eval", "dense"),
        ("lm_eval", "language"),
    ],
)
def test_the_extra_that_brings_a_package_is_named(module, extra, capsys):
    explain(ModuleNotFoundError(f"No module named {module!r}", name=module), options())
    said = capsys.readouterr().err
    assert f"`pip install 'linvit[{extra}]'`" in said
    assert f"`pip install '.[{extra}]'`" in said
    assert "," not in said.partition("[")[2].partition("]")[0]


def test_a_package_of_nobody_is_named_alone(capsys, monkeypatch):
    explain(ModuleNotFoundError("No module named 'nowhere'", name="nowhere"), options())
    assert "`pip install nowhere`" in capsys.readouterr().err
    monkeypatch.setattr(failures, "_requirements", lambda: ())
    explain(ModuleNotFoundError("No module named 'rich'", name="rich"), options())
    assert "`pip install rich`" in capsys.readouterr().err


def test_settings_are_spelled_as_the_command_does(capsys):
    def said(sentence, *given, **flags):
        explain(SettingError(sentence), options(*given, **flags))
        return capsys.readouterr().err.strip()

    sentence = "`size`, `topk=3` and `output` do not fit: `what`"
    assert said(sentence, topk="--topk") == "linvit: `size`, --topk 3 and `output` do not fit: `what`"
    flags = {"topk": "--topk", "output": "--output"}
    assert said(sentence, "eval", True, **flags) == "linvit: data.size, --topk 3 and --output do not fit: `what`"
    assert said("`size` and `crop_pct`", "eval", True, ["data.name=digits"]) == "linvit: data.size and `crop_pct`"
    assert said("`resume=True`, `run that` and a `", resume="--resume") == "linvit: --resume, `run that` and a `"


def test_settings_of_a_group_become_keys():
    with pytest.raises(SettingError) as refusal, keys_of("task"), keys_of("data", {"size"}, seed="seed"):
        raise SettingError("`size` and `seed` do not fit `lr`")
    assert str(refusal.value) == "data.size and seed do not fit task.lr"
    error = pickle.loads(pickle.dumps(SettingError.of("size", "a" * 99, "a number", "set it lower")))
    assert str(error) == f"`size` is '{'a' * 59} …, expected a number: set it lower."
    assert (error.argument, error.value, error.expected, error.remedy) == ("size", "a" * 99, "a number", "set it lower")


def test_of_several_faults_the_first_is_said():
    refuse(False, 1 < 0 and "never")
    with pytest.raises(SettingError, match="second"):
        refuse(False, "second", "third")

"""Mistakes in recipes: odd values, broken files, and classes that a recipe must not name."""

import copy
import math
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from fuzz_play import Case, command
from hypothesis import strategies as st
from images_by_class import write_classes
from tiny_run import TINY

from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import merge, parsed_override

ONE_STEP = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
FEW = {"held_out": 0.03}  # so that evaluations take no time
DIGITS = merge(TINY, {"schedule": {"warmup_epochs": 0}, "trainer": ONE_STEP, "data": FEW, "folder": "run"})
IMAGES = merge(DIGITS, {"data": {"name": "imagefolder", "root": "photos", "size": 32, "num_workers": 0}})
del IMAGES["data"]["max_shift"]

NUMBERS = ["0", "1", "2", "-1", "0.5", "-0.5", "1e400", "-.inf", ".nan", "1e-300", "99", "100000000000000000000"]
OTHERS = ["", "null", "true", "[]", "[1, 2, 3]", "[.nan]", "{}", "{foo: 1}", "{1: 2}", "[[]]", "abc", "🙂", "../x"]
OTHERS += ["~/x", "'  '", "2001-01-01", "!!binary aGk=", "*a", "[b]x[/b]", "$\\frac{1}{$", "x" * 2000, "0x10", "1_000"]
OTHERS += ["@", "%"]
LONG_WORK = ("trainer.max_epochs", "trainer.max_steps", "trainer.min_epochs", "trainer.min_steps")
PROCESSES = ("trainer.devices", "trainer.num_nodes")  # Lightning would start pytest again, and kill this process


def numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def between(least: float, most: float = math.inf, more: tuple[Any, ...] = ()) -> Callable[[Any], bool]:
    """Finite numbers between two, and what else is right."""
    return lambda value: value in more or (numeric(value) and math.isfinite(value) and least <= value <= most)


RIGHT: dict[str, Callable[[Any], bool]] = {
    "optimizer.lr": between(1e-300),
    "optimizer.lr_batch": between(1, more=(None,)),
    "optimizer.weight_decay": between(0),
    "optimizer.layer_decay": between(1e-300, 1, more=(None,)),
    "schedule.warmup_epochs": between(0),
    "schedule.warmup_steps": between(0, more=(None,)),
    "schedule.warmup_lr": between(0),
    "schedule.min_lr": between(0, 1e-3),
    "schedule.cooldown_epochs": between(0),
    "schedule.power": between(1e-300),
    "schedule.decay_rate": between(0),
    "distillation.weight": between(0, 1),
    "task.label_smoothing": between(0, 1),
    "task.mixup": between(0),
    "task.cutmix": between(0),
    "task.mix_probability": between(0, 1),
    "task.mix_switch": between(0, 1),
    "task.ema_decay": between(0, 1 - 1e-9, more=(None,)),
    "task.ema_batch": between(1, more=(None,)),
    "data.size": between(1, 100000),
    "data.batch_size": between(1),
    "data.max_shift": between(0, 32),
    "data.held_out": between(1e-300, 1 - 1e-9),
    "data.num_workers": between(0, 1024),
    "data.max_corrupt": between(0),
    "data.crop_pct": between(1e-300, 1),
    "seed": between(0),
    "trainer.limit_train_batches": between(1e-300, more=(None,)),
    "trainer.accumulate_grad_batches": between(1),
    "trainer.gradient_clip_val": between(0, more=(None,)),
    "trainer.devices": between(1, os.cpu_count() or 1, more=("auto", None)),
    "trainer.num_nodes": between(1),
    "trainer.max_epochs": between(1, more=(None,)),
    "folder": lambda value: isinstance(value, str) and bool(value.strip()),
}
"""What a person would call right; everything else must be refused. Written without a look at the package's ranges."""


def flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return keys


@cache
def keys_of(base: str) -> list[str]:
    """Every key of a resolved recipe, with the groups themselves and options of a network."""
    keys = flat(Recipe(copy.deepcopy({"digits": DIGITS, "photos": IMAGES}[base])).resolved())
    groups = ["model", "optimizer", "schedule", "task", "data", "trainer", "optimizer.options", "base"]
    network = ["pretrained", "pattern", "depths", "embed_dims", "num_heads", "attention", "attention.1", "mlp_ratios"]
    return sorted({*keys, *groups, *RIGHT, *(f"model.{key}" for key in network), "optimizer.options.foo", "data.root"})


def train_recipe(values: dict[str, Any], *arguments: str) -> Callable[[Path], int]:
    """Trains a recipe of digits or photos for one step."""

    def act(work: Path) -> int:
        if values["data"]["name"] == "imagefolder" and values["data"]["root"] == "photos":
            write_classes(work / "photos", {"cat": 6, "dog": 6}, (36, 40))
        Path("recipe.yaml").write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        return command("train", "recipe.yaml", *arguments)

    return act


def is_wrong(key: str, text: str) -> bool:
    if key not in RIGHT:
        return False
    try:
        value = parsed_override(f"{key}={text}")[1]
    except ValueError:
        return True
    return not RIGHT[key](value)


@st.composite
def recipe_values(draw: st.DrawFn) -> Case:
    base = draw(st.sampled_from(["digits", "photos"]))
    known = draw(st.booleans())
    key = draw(st.sampled_from(sorted(RIGHT) if known else keys_of(base)))
    text = draw(st.sampled_from(["0", "1", "-1", *OTHERS] if key in LONG_WORK + PROCESSES else NUMBERS + OTHERS))
    values = {"digits": DIGITS, "photos": IMAGES}[base]
    return Case(f"train {base} {key}={text[:40]}", train_recipe(values, f"{key}={text}"), is_wrong(key, text))


ALLOWED_CALLBACKS = [
    {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
    {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}},
]
CLASS_PATHS: list[Any] = [
    "evil.X",
    "evil",
    "evil.f",
    {"class_path": "evil.X"},
    {"class_path": "evil.X", "init_args": {"a": 1}},
    {"class_path": "os.system", "init_args": {"command": "true"}},
    {"class_path": "builtins.exec", "init_args": {"source": "1"}},
    {"class_path": "subprocess.Popen", "init_args": {"args": ["true"]}},
    {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_fit_start": "evil.f"}},
    {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": "os.getcwd"}},
    {"class_path": "torch.hub.load", "init_args": {"repo_or_dir": "a/b", "model": "c"}},
    {"class_path": "torch.load", "init_args": {"f": "x"}},
    {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "../outside"}},
    {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "../outside"}},
    {"class_path": "lightning.pytorch.callbacks.NoSuchCallback"},
    {"class_path": 3},
    {"class_path": None},
    {"init_args": {}},
    "lightning.pytorch.callbacks",
    [[]],
    3,
]


@st.composite
def class_paths(draw: st.DrawFn) -> Case:
    key = draw(st.sampled_from(["callbacks", "logger", "plugins", "profiler", "strategy", "accelerator"]))
    fine = key == "callbacks" and draw(st.booleans())
    value = draw(st.sampled_from(ALLOWED_CALLBACKS if fine else CLASS_PATHS))
    value = [value] if key in ("callbacks", "plugins") and draw(st.booleans()) else value
    return Case(f"train trainer.{key}={value}", train_recipe(merge(DIGITS, {"trainer": {key: value}})), not fine)


def nested(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + closing * depth).encode()


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n".encode() for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPE_FILES = {
    "empty": b"",
    "zeros": bytes(100),
    "noise": bytes(range(256)) * 4,
    "list": b"- 1\n- 2\n",
    "deep list": b"model: " + nested(100000, "[", "]"),
    "deep mapping": b"model: " + nested(3000, "{a: ", "}"),
    "alias bomb": BOMB + b"model: *i\n",
    "bomb in options": BOMB + b"optimizer: {options: *i}\n",
    "itself": b"model: &m {name: ravlt_nano, more: *m}\n",
    "python": b"model: !!python/object/apply:os.system ['touch ../code']\n",
    "python name": b"model: !!python/name:evil.X\n",
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "numbers as keys": b"1: 2\nmodel: {3: 4}\ntrainer: {null: 5}\n",
    "tabs": b"model:\n\tname: ravlt_nano\n",
    "merge": b"model: {<<: 3}\n",
    "own base": b"base: recipe.yaml\n",
    "base of a list": b"base: [1]\n",
}
"""Files that are no recipe."""


@st.composite
def recipe_files(draw: st.DrawFn) -> Case:
    """A broken file, or a good one with a line or byte changed."""
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(RECIPE_FILES)))
        return Case(f"train a recipe: {name}", partial(train_bytes, RECIPE_FILES[name]), True)
    text = yaml.safe_dump(DIGITS).encode()
    change = draw(st.sampled_from(["cut", "byte", "line twice", "line away", "shift", "utf-16", "bom", "latin-1"]))
    place = draw(st.integers(0, len(text) - 1))
    byte = draw(st.integers(0, 255))
    return Case(
        f"train a recipe: {change} at {place} with {byte}", partial(train_bytes, changed(text, change, place, byte))
    )


def changed(text: bytes, change: str, place: int, byte: int) -> bytes:
    lines = text.splitlines(keepends=True)
    number = place % len(lines)
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: text[:place],
        "byte": lambda: text[:place] + bytes([byte]) + text[place + 1 :],
        "line twice": lambda: b"".join([*lines[:number], lines[number], *lines[number:]]),
        "line away": lambda: b"".join(lines[:number] + lines[number + 1 :]),
        "shift": lambda: b"".join([*lines[:number], b"  " + lines[number], *lines[number + 1 :]]),
        "utf-16": lambda: text.decode().encode("utf-16"),
        "bom": lambda: b"\xef\xbb\xbf" + text,
        "latin-1": lambda: text + "# größer\n".encode("latin-1"),
    }
    return changes[change]()


def train_bytes(content: bytes, work: Path) -> int:
    Path("recipe.yaml").write_bytes(content)
    return command("train", "recipe.yaml", *(f"trainer.{key}={value}" for key, value in ONE_STEP.items()))

"""What clumsy and hostile users do, as Hypothesis strategies: one for each class of mistakes in KINDS."""

import argparse
import copy
import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import yaml
from fuzz_play import Case, call, command
from hypothesis import strategies as st
from images_by_class import write_classes
from PIL import Image
from tiny_run import TINY

import linvit
from linvit.ops import linear_attention, mala, rala
from linvit.runs.own_images import new_recipe
from linvit.runs.recipe import Recipe, merge, parsed_override
from linvit_cli import _parser

ONE_STEP = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
DIGITS = merge(TINY, {"schedule": {"warmup_epochs": 0}, "trainer": ONE_STEP, "folder": "run"})
IMAGES = merge(DIGITS, {"data": {"name": "imagefolder", "root": "photos", "size": 32, "num_workers": 0}})
del IMAGES["data"]["max_shift"]

NUMBERS = ["0", "1", "2", "-1", "0.5", "-0.5", "1e400", "-.inf", ".nan", "1e-300", "99", "100000000000000000000"]
OTHERS = [
    "",
    "null",
    "true",
    "[]",
    "[1, 2, 3]",
    "[.nan]",
    "{}",
    "{foo: 1}",
    "{1: 2}",
    "[[]]",
    "abc",
    "🙂",
    "../x",
    "~/x",
]
OTHERS += [
    "'  '",
    "2001-01-01",
    "!!binary aGk=",
    "*a",
    "[b]x[/b]",
    "$\\frac{1}{$",
    "x" * 2000,
    "0x10",
    "1_000",
    "@",
    "%",
]
LONG_WORK = ("trainer.max_epochs", "trainer.max_steps", "trainer.min_epochs", "trainer.min_steps")


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
    text = draw(st.sampled_from(["0", "1", "-1", *OTHERS] if key in LONG_WORK else NUMBERS + OTHERS))
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
    # a line that is lost may lose the limits too
    keep = [f"trainer.{key}={value}" for key, value in ONE_STEP.items()] if b"max_epochs" in content else []
    return command("train", "recipe.yaml", *keep)


WORDS = ["", " ", "-", "--", "~", "nothing.yaml", "photos", "note.txt", "run", ".", "/dev/full", "/dev/null", "a\nb"]
WORDS += ["demo/ravlt_nano_digits", "ravlt_nano", "[/b]", "\x1b[31m", "é", "\udcff", "x" * 300, "data=", "data.size=-1"]
WORDS += ["-1", "0", "1", "nan", "1e400", "99999999999999999999", "k=v", "data.nope=1", "--bogus", "None", "hf-hub:a/b"]
HEAVY = ("demo", "study", "compare", "bench", "data", "convert")
"""Commands that could work for minutes: their cases always have a mistake."""


@cache
def options_of(name: str) -> list[str]:
    """The option strings of a command and of its actions."""
    parsers = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    found, waiting = [], [parsers[name]]
    while waiting:
        for action in waiting.pop()._actions:
            found += action.option_strings[-1:]
            if isinstance(action, argparse._SubParsersAction):
                found += list(action.choices)
                waiting += action.choices.values()
    return sorted({*found} - {"--help", "--debug", "--version"})


@st.composite
def command_lines(draw: st.DrawFn) -> Case:
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    name = draw(st.sampled_from(sorted(commands)))
    word = st.sampled_from([*WORDS, *WORDS, *options_of(name)])
    arguments = draw(st.lists(word, max_size=6))
    if name in HEAVY:
        arguments.insert(
            draw(st.integers(0, len(arguments))), draw(st.sampled_from(["--bogus", "--seeds=0", "--rounds=0"]))
        )
        arguments.append("--no-such-option")
    shown = f"linvit {name} {' '.join(map(repr, arguments))}"
    return Case(shown, partial(type_words, [name, *arguments]), name in HEAVY)


def type_words(arguments: list[str], work: Path) -> int:
    write_classes(work / "photos", {"cat": 2, "dog": 2}, (8, 8))
    Path("note.txt").write_text("Buy milk.\n")
    shutil.copytree(tiny_folder(), "run")
    return command(*arguments)


@cache
def tiny_folder() -> Path:
    """A run that was trained for one step, once for each process."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "run"
    linvit.train(write_yaml(folder.parent / "tiny.yaml", DIGITS), folder=folder)
    return folder


def write_yaml(path: Path, values: Any) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


@cache
def tiny_checkpoint() -> dict[str, Any]:
    return torch.load(tiny_folder() / "checkpoints" / "last.ckpt", weights_only=True)


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 4) -> list[tuple[Any, ...]]:
    """Paths into the nested dictionaries of a checkpoint, the tensors' names left out but for some."""
    if not isinstance(value, dict) or depth == 0:
        return [path]
    keys = list(value)[:3] if len(value) > 60 else list(value)
    return [path, *(deeper for key in keys for deeper in places(value[key], (*path, key), depth - 1))]


ODD: list[Any] = [None, -1, 0, 10**6, 10**30, math.nan, math.inf, "", "x", "hf-hub:a/b", [], [1], {}, {"a": {}}, True]
ODD += [[10**6] * 4, "../x", {1: 2}, torch.zeros(3), torch.full((2, 2), math.nan), ["a", 3, None], "[/b]", "ravlt_tiny"]


@st.composite
def checkpoints(draw: st.DrawFn) -> Case:
    held = tiny_checkpoint()
    interesting = [path for path in places(held) if path and path[0] in ("linvit", "hyper_parameters")]
    path = draw(st.sampled_from(interesting if draw(st.integers(0, 3)) else places(held)[1:]))
    new = draw(st.sampled_from(["delete", *range(len(ODD))]))
    use = draw(st.sampled_from(["predict", "eval", "init", "resume", "report"]))
    what = "deleted" if new == "delete" else f"= {ODD[new]!r}"[:60]
    return Case(f"{use} of a checkpoint, {'.'.join(map(str, path))} {what}", partial(use_checkpoint, path, new, use))


def use_checkpoint(path: tuple[Any, ...], new: Any, use: str, work: Path) -> int:
    checkpoint = copy.deepcopy(tiny_checkpoint())
    within = checkpoint
    for key in path[:-1]:
        within = within[key]
    if new == "delete":
        del within[path[-1]]
    else:
        within[path[-1]] = ODD[new]
    shutil.copytree(tiny_folder(), "run")
    torch.save(checkpoint, "run/checkpoints/last.ckpt")
    if use in ("predict", "eval", "report"):
        os.remove("run/checkpoints/best.ckpt")
    Image.new("L", (8, 8), 100).save("image.png")
    Path("recipe.yaml").write_text(yaml.safe_dump(DIGITS))
    settings = {
        "predict": ["predict", "run/checkpoints/last.ckpt", "image.png"],
        "eval": ["eval", "run/checkpoints/last.ckpt", "--json"],
        "report": ["eval", "run", "--report", "page.html"],
        "init": ["train", "recipe.yaml", "folder=new", "init=run/checkpoints/last.ckpt"],
        "resume": ["train", "recipe.yaml", "--resume", "trainer.max_epochs=2"],
    }
    return command(*settings[use])


def png(width: int, height: int) -> bytes:
    """The head of a PNG that claims a size, with almost nothing in it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_image(mode: str, size: tuple[int, int], path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    Image.fromarray(pixels).convert("RGB").convert(mode).save(path)


BAD_FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("Buy milk.\n"),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "bomb": lambda path: path.write_bytes(png(100000, 100000)),
    "truncated": lambda path: path.write_bytes(png(300, 300)),
    "no side": lambda path: path.write_bytes(png(0, 10)),
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
}
"""Under the name of an image, what none is."""
GOOD_FILES: dict[str, Callable[[Path], Any]] = {
    "grey": partial(write_image, "L", (40, 36)),
    "palette": partial(write_image, "P", (40, 36)),
    "one bit": partial(write_image, "1", (40, 36)),
    "narrow": partial(write_image, "RGB", (1, 200)),
    "one pixel": partial(write_image, "RGB", (1, 1)),
}
NAMES = [
    "a.png",
    "b c.png",
    "[final].png",
    "[/b].png",
    "é.png",
    os.fsdecode(b"\xff.png"),
    "\x1b[31m.png",
    "$\\frac{1}{$.png",
    "-x.png",
]


@st.composite
def image_files(draw: st.DrawFn) -> Case:
    kinds = draw(st.lists(st.sampled_from(sorted(BAD_FILES) + sorted(GOOD_FILES)), min_size=1, max_size=4))
    name = draw(st.sampled_from(NAMES))
    use = draw(st.sampled_from(["predict", "predict --output", "train", "train some", "new", "eval"]))
    good = [kind for kind in kinds if kind in GOOD_FILES]
    wrong = not good and not use.startswith("train some") and use != "eval"
    return Case(f"{use} on {kinds} named {name!r}", partial(use_images, kinds, name, use), wrong)


def use_images(kinds: list[str], name: str, use: str, work: Path) -> int:
    for label in ("cat", "dog"):
        for split in ("train", "val") if use in ("train", "train some", "eval") else ("",):
            folder = Path("photos", split, label)
            folder.mkdir(parents=True)
            for number, kind in enumerate(kinds):
                (BAD_FILES | GOOD_FILES)[kind](folder / f"{number}{name}")
            if use in ("train some", "eval"):
                for number in range(4):
                    write_image("RGB", (33, 35), folder / f"good{number}.png")
    more = ["--output", f"{name}.csv"] if use.endswith("--output") else []
    if use.startswith("train"):
        Path("recipe.yaml").write_text(yaml.safe_dump(merge(IMAGES, {"data": {"max_corrupt": 100}})))
        return command("train", "recipe.yaml", "trainer.limit_train_batches=1.0", "trainer.limit_val_batches=1.0")
    if use == "new":
        return command("new", "own.yaml", "--model", "ravlt_nano", "--data", "photos")
    if use == "eval":
        return command("eval", str(tiny_folder()), "data=photos", "data.max_corrupt=100")
    return command("predict", str(tiny_folder()), "photos", *more)


JSON_FILES: dict[str, Any] = {
    "deep": nested(100000, "[", "]"),
    "empty": b"",
    "list": b"[]",
    "number": b"1",
    "nan": b'{"images": NaN}',
    "huge": b'{"images": 1' + b"0" * 5000 + b"}",
    "utf-16": '{"images": []}'.encode("utf-16"),
    "no images": {"images": [], "annotations": [], "categories": []},
}


@st.composite
def annotations(draw: st.DrawFn) -> Case:
    """A COCO file that is broken, or whose one object has an odd entry."""
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(JSON_FILES)))
        return Case(f"data check of annotations: {name}", partial(check_annotations, JSON_FILES[name]), True)
    group = draw(st.sampled_from(["images", "annotations", "categories"]))
    keys = {
        "images": ["id", "file_name", "width", "height"],
        "annotations": ["id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"],
        "categories": ["id", "name"],
    }
    key = draw(st.sampled_from(keys[group]))
    odd = [
        None,
        -1,
        0,
        1.5,
        10**400,
        math.inf,
        math.nan,
        "x",
        "../../etc/passwd",
        [],
        [1],
        [0, 0, -5, 5],
        [math.nan] * 4,
    ]
    odd += [
        [10**400] * 4,
        {},
        {"size": [1, 1], "counts": "x"},
        {"size": [8, 8], "counts": [-1]},
        [[1, 2, 3]],
        True,
        "/x",
    ]
    value = draw(st.sampled_from(odd))
    content = copy.deepcopy(COCO)
    content[group][0][key] = value
    return Case(f"data check, {group}.{key} = {str(value)[:40]}", partial(check_annotations, content))


COCO: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
    "annotations": [
        {
            "id": 1,
            "image_id": 1,
            "category_id": 1,
            "bbox": [1, 1, 4, 4],
            "area": 16,
            "iscrowd": 0,
            "segmentation": [[1, 1, 5, 1, 5, 5, 1, 5]],
        }
    ],
    "categories": [{"id": 1, "name": "cat"}],
}


def check_annotations(content: Any, work: Path) -> int:
    for split in ("train", "val"):
        folder = Path("coco", f"{split}2017")
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "a.png")
        Path("coco/annotations").mkdir(exist_ok=True)
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        Path(f"coco/annotations/instances_{split}2017.json").write_bytes(text)
    return command("data", "check", "coco")


VALUES: list[Any] = [None, [], {}, "x", "", 3, -1, 0.5, math.nan, True, b"x", object(), np.zeros(3), torch.zeros(0)]
VALUES += [
    torch.zeros(2, 3),
    torch.zeros(1, 2, 4, 3).to_sparse(),
    torch.zeros(1, 2, 4, 3, dtype=torch.int32),
    Path("no"),
]
VALUES += [
    torch.zeros(1, 2, 4, 3, device="meta"),
    np.zeros((8, 8, 3)),
    lambda: 0,
    torch.nn.Linear(2, 2),
    ["x", 3],
    {1: 2},
]


def tokens() -> torch.Tensor:
    return torch.rand(1, 2, 4, 3)


CALLS: dict[str, Callable[[Any], Any]] = {
    "train(X)": lambda value: linvit.train(value),
    "train(recipe, X)": lambda value: linvit.train("demo/ravlt_nano_digits", {"optimizer.lr": value, "sed": 1}),
    "train(recipe, folder=X)": lambda value: linvit.train("demo/ravlt_nano_digits", {"sed": 1}, folder=value),
    "load_run(X)": lambda value: linvit.load_run(value),
    "load_run(model=X)": lambda value: linvit.load_run(model=value, checkpoint=value),
    "run.predict(X)": lambda value: tiny_run().predict(value),
    "run.predict(image, topk=X)": lambda value: tiny_run().predict([Image.new("L", (9, 9))], topk=[value]),
    "run.evaluate(X)": lambda value: tiny_run().evaluate(Path("nothing"), value),
    "run.analyze(X)": lambda value: tiny_run().analyze(value),
    "run.generate(X)": lambda value: tiny_run().generate(prompt=value),
    "load_released(X)": lambda value: linvit.load_released(value, value),
    "swap_attention(X)": lambda value: linvit.swap_attention(value, "rala"),
    "swap_attention(deit, X)": lambda value: linvit.swap_attention(deit(), value),
    "fuse(X)": lambda value: linvit.fuse(value if not isinstance(value, torch.nn.Module) else 3),
    "create_model(pattern=X)": lambda value: timm.create_model("ravlt_nano", pattern=value),
    "create_model(depths=X)": lambda value: timm.create_model("mavit_nano", depths=value),
    "network(X)": lambda value: nano()(value),
    "linear_attention(X)": lambda value: linear_attention(value, tokens(), tokens()),
    "linear_attention(value=X)": lambda value: linear_attention(tokens(), tokens(), value),
    "linear_attention(feature_map=X)": lambda value: linear_attention(*three(), feature_map=value),
    "rala(X)": lambda value: rala(tokens(), value, tokens()),
    "rala(rotary=X)": lambda value: rala(*three(), rotary=value if value is not None else 3),
    "mala(X)": lambda value: mala(value, value, value),
    "mala(backend=X)": lambda value: mala(*three(), backend=value),
    "new_recipe(X)": lambda value: new_recipe("own.yaml", "ravlt_nano", value),
    "new_recipe(model=X)": lambda value: new_recipe("own.yaml", value, "."),
}
"""Functions that get one odd argument."""


def three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens(), tokens(), tokens()


@cache
def tiny_run() -> Any:
    return linvit.load_run(tiny_folder())


@cache
def nano() -> torch.nn.Module:
    return timm.create_model("ravlt_nano", num_classes=2).eval()


def deit() -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)


@st.composite
def python_calls(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(sorted(CALLS)))
    number = draw(st.integers(0, len(VALUES) - 1))
    shown = str(VALUES[number]).splitlines()
    shown = f"{name}, X = {type(VALUES[number]).__name__} {shown[0][:30] if shown else ''}"
    return Case(shown, lambda work: call(CALLS[name], VALUES[number]))


KINDS: dict[str, tuple[st.SearchStrategy[Case], int]] = {
    "recipe values": (recipe_values(), 500),
    "recipe files": (recipe_files(), 150),
    "class paths": (class_paths(), 100),
    "command lines": (command_lines(), 400),
    "checkpoints": (checkpoints(), 300),
    "image files": (image_files(), 200),
    "annotations": (annotations(), 150),
    "Python calls": (python_calls(), 200),
}
"""Class of mistakes → its cases, and how many of the 2,000 are of it."""

"""Odd words on the command line, and odd arguments of Python functions."""

import argparse
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from fuzz_play import Case, call, command
from fuzz_run import tiny_folder
from hypothesis import strategies as st
from images_by_class import write_classes
from PIL import Image

import linvit
from linvit.ops import linear_attention, mala, packed_linear_attention, rala
from linvit.runs.own_images import new_recipe
from linvit_cli import _parser

WORDS = ["", " ", "-", "--", "~", "nothing.yaml", "photos", "note.txt", "run", ".", "/dev/full", "/dev/null", "a\nb"]
WORDS += ["demo/ravlt_nano_digits", "ravlt_nano", "[/b]", "\x1b[31m", "é", "\udcff", "x" * 300, "data=", "data.size=-1"]
WORDS += ["-1", "0", "1", "nan", "1e400", "99999999999999999999", "k=v", "data.nope=1", "--bogus", "None", "hf-hub:a/b"]
HEAVY = ("demo", "compare", "bench", "data", "convert", "push", "explore")
"""Commands that could work for minutes, serve a page or send files: their cases always have a mistake."""


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


VALUES: list[Any] = [None, [], {}, "x", "", 3, -1, 0.5, math.nan, True, b"x", object(), np.zeros(3), torch.zeros(0)]
VALUES += [torch.zeros(2, 3), torch.zeros(1, 2, 4, 3).to_sparse(), torch.zeros(1, 2, 4, 3, dtype=torch.int32)]
VALUES += [torch.zeros(1, 2, 4, 3, device="meta"), np.zeros((8, 8, 3)), lambda *arguments: 0, torch.nn.Linear(2, 2)]
VALUES += [["x", 3], {1: 2}, Path("no")]


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
    "register_mechanism(X)": lambda value: linvit.register_mechanism(value),
    "packed_linear_attention(X)": lambda value: packed_linear_attention(value),
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

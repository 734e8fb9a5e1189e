"""Damaged files: checkpoints and images."""

import copy
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from fuzz_play import Case, command
from fuzz_recipes import DIGITS, IMAGES
from fuzz_run import tiny_checkpoint, tiny_folder
from hostile import png_header
from hypothesis import strategies as st
from PIL import Image

from linvit.runs.recipe_values import merge


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


def write_image(mode: str, size: tuple[int, int], path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    Image.fromarray(pixels).convert("RGB").convert(mode).save(path)


BAD_FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("Buy milk.\n"),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "bomb": lambda path: path.write_bytes(png_header(100_000, 100_000)),
    "truncated": lambda path: path.write_bytes(png_header(300, 300)),
    "no side": lambda path: path.write_bytes(png_header(0, 10)),
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
NAMES = ["a.png", "b c.png", "[final].png", "[bold].png", "é.png", "\udcff.png", "\x1b[31m.png", "-x.png"]
NAMES += ["$\\frac{1}{$.png"]


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

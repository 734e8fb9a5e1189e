"""`linvit data make-…` writes stand-ins for COCO, ADE20K and LibriSpeech, or latents; `data check` reads any data."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linvit_cli.failures import SOME_FAILED, say
from linvit_cli.parser import examples, listing, whole
from linvit_cli.run_arguments import data_settings
from linvit_cli.streams import show, show_rows

if TYPE_CHECKING:
    from linvit.runs.data_check import CheckedSplit

HELP = "Make small data sets, or check your own."
EXAMPLES = ("linvit data make-scenes data/scenes", "linvit data check data/scenes/segmentation")
TAKES_OVERRIDES = True
MOST_CLASSES, MOST_PROBLEMS, LONGEST_NAME = 30, 100, 80
Action = Callable[[argparse.Namespace], int]


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit data ACTION [options]"
    actions = command.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="linvit data", help=argparse.SUPPRESS
    )
    texts = {}

    def add(name: str, run: Action, text: str, *shown: str) -> argparse.ArgumentParser:
        texts[name] = text
        action = actions.add_parser(name, description=text, epilog=examples(*shown))
        action.set_defaults(make=run)
        return action

    text = "Write scenes of handwritten digits as COCO and ADE20K do."
    scenes = add("make-scenes", _make_scenes, text, "linvit data make-scenes data/scenes --train 200 --val 40")
    scenes.add_argument("folder", metavar="FOLDER", help="new or empty folder; gets detection/ and segmentation/")
    _add_numbers(scenes, "scenes", train=1000, val=200)
    scenes.add_argument("--size", metavar="PX", type=whole, default=128, help="height and width in pixels")

    text = "Find the format of data, read every file, and list problems."
    check = add("check", _check, text, "linvit data check photos", "linvit data check data/coco data.needs_masks=false")
    check.usage = "linvit data check FOLDER [data.key=value ...] [options]"
    check.add_argument("path", metavar="FOLDER", type=Path, help="the data; or one .json file in COCO's format")
    text = "format, as data.name in recipes (default: the one that fits the folder)"
    check.add_argument("--format", metavar="NAME", help=text)

    text = "Encode images with an autoencoder, for image generators."
    example = "linvit data make-latents imagenet data/latents --vae stabilityai/sd-vae-ft-mse"
    latents = add("make-latents", _make_latents, text, example)
    latents.add_argument("images", metavar="IMAGES", help="folder with train/CLASS and val/CLASS")
    latents.add_argument("folder", metavar="FOLDER", help="where the latents go; a stopped command resumes there")
    text = "autoencoder: a folder saved by diffusers, or a name on the Hugging Face hub"
    latents.add_argument("--vae", metavar="VAE", required=True, help=text)
    text = "height and width of the images in pixels"
    latents.add_argument("--size", metavar="PX", type=whole, default=256, help=text)

    text = "Write digits spoken by espeak-ng, in the layout of LibriSpeech."
    speech = add("make-speech", _make_speech, text, "linvit data make-speech data/speech")
    speech.add_argument("folder", metavar="FOLDER", help="new or empty folder; gets train/ and val/")
    _add_numbers(speech, "utterances", train=900, val=120)
    command.description = f"{HELP}\n\nactions:\n{listing(texts)}"


def _add_numbers(action: argparse.ArgumentParser, things: str, train: int, val: int) -> None:
    action.add_argument("--train", metavar="N", type=whole, default=train, help=f"number of training {things}")
    action.add_argument("--val", metavar="N", type=whole, default=val, help=f"number of validation {things}")
    action.add_argument("--seed", metavar="N", type=whole, default=0, help="seed of the random numbers")


def run(options: argparse.Namespace) -> int:
    make: Action = options.make
    if options.overrides and make is not _check:
        options.parser.refuse(options.overrides)
    return make(options)


def _make_scenes(options: argparse.Namespace) -> int:
    from linvit.data.dense.scenes import make_scenes
    from linvit.runs.progress import tracked

    folder, total = options.folder, options.train + options.val
    scenes = make_scenes(folder, options.train, options.val, options.size, options.seed)
    count = sum(1 for _ in tracked(scenes, "scenes", total))
    show(f"{count} scenes: {folder}/detection is in COCO's format, {folder}/segmentation in ADE20K's.")
    return 0


def _make_speech(options: argparse.Namespace) -> int:
    from linvit.data.speech.spoken_digits import make_speech
    from linvit.runs.progress import tracked

    folder, total = options.folder, options.train + options.val
    count = sum(1 for _ in tracked(make_speech(folder, options.train, options.val, options.seed), "utterances", total))
    show(f"{count} utterances: {folder}/train and {folder}/val are in LibriSpeech's layout.")
    return 0


def _make_latents(options: argparse.Namespace) -> int:
    from linvit.data.generation import make_latents

    for split, done, total in make_latents(options.images, options.folder, options.vae, options.size):
        show(f"{split}: {done:,} of {total:,} images")
    show(f"{options.folder} contains the latents: train on them with data.name=latents data.root={options.folder}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from linvit.runs.data_check import check_data

    checked = check_data(options.path, options.format, data_settings(options.overrides), progress=True)
    word = "task" if checked.benchmarks else "split"
    show_rows(
        [{word: split.name} | _counts(split) for split in checked.splits],
        title=f"{options.path}: {checked.settings['name']}",
    )
    rows = _classes(checked.splits)
    if rows:
        more = f"and {len(rows) - MOST_CLASSES:,} more classes" if len(rows) > MOST_CLASSES else None
        show_rows(rows[:MOST_CLASSES], caption=more)
    if "root" in checked.settings:
        show(f"In a recipe:\n\n{checked.recipe}")
    if checked.benchmarks:
        tasks = " ".join(checked.benchmarks)
        command = f"linvit eval RUN --tasks {tasks} --task-data {shlex.quote(str(options.path))}"
        show(f"A language model is evaluated by\n\n{command}")
    if not checked.problems:
        return 0
    heading = f"linvit: {len(checked.problems):,} problem{'s' if len(checked.problems) > 1 else ''} found:"
    return say("\n  ".join([heading, *checked.problems]), SOME_FAILED, MOST_PROBLEMS)


def _counts(split: "CheckedSplit") -> dict[str, str]:
    sizes = dict(zip(("smallest", "median", "largest"), map(_size, split.sizes), strict=False))
    return {**{key: f"{value:,}" for key, value in split.counts.items()}, **sizes}


def _classes(splits: "Sequence[CheckedSplit]") -> list[dict[str, str]]:
    """A row for each class, with its amounts in each split."""
    rows: dict[str, dict[str, str]] = {}
    for split in splits:
        for name, amounts in split.classes.items():
            row = rows.setdefault(name, {"class": name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]} …"})
            row |= {f"{split.name} {heading}": f"{amount:,}" for heading, amount in amounts.items()}
    return list(rows.values())


def _size(size: tuple[float, ...]) -> str:
    if len(size) == 2:
        return f"{size[0]}×{size[1]} px"
    return f"{size[0]:,} bytes" if isinstance(size[0], int) else f"{size[0]:.2f} s"

"""`linvit data make-…` writes stand-ins for COCO, ADE20K and LibriSpeech, or latents; `data check` reads dense data."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit_cli.failures import SOME_FAILED
from linvit_cli.tables import show_rows

if TYPE_CHECKING:
    from linvit.data.dense.check import Checked


HELP = "Make scenes of digits or spoken digits, or check detection and segmentation data."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit data (make-scenes FOLDER [--train N] [--val N] [--size N] [--seed N] | check FOLDER|FILE"
        " | make-latents IMAGES FOLDER --vae VAE [--size N] | make-speech FOLDER [--train N] [--val N] [--seed N])"
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", prog="linvit data")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(make=run)
        return action

    scenes = add("make-scenes", _make_scenes, "Write scenes of real handwritten digits, in COCO's and ADE20K's format.")
    scenes.add_argument("folder", metavar="FOLDER", help="a new or empty folder; gets detection/ and segmentation/")
    scenes.add_argument("--train", type=int, default=1000, help="number of training scenes (1000)")
    scenes.add_argument("--val", type=int, default=200, help="number of validation scenes (200)")
    scenes.add_argument("--size", type=int, default=128, help="height and width in pixels (128)")
    scenes.add_argument("--seed", type=int, default=0, help="seed of the random scenes (0)")
    check = add("check", _check, "Read every image and annotation of a data set and name what is wrong with them.")
    check.add_argument("path", metavar="FOLDER|FILE", type=Path, help="in COCO's or ADE20K's layout, or a COCO .json")
    check.add_argument("--boxes", action="store_true", help="objects have boxes only: look for no masks")
    check.add_argument("--labels", type=int, help="number of classes of label maps (the folder's table, else 150)")
    latents = add("make-latents", _make_latents, "Encode an image folder with an autoencoder, for image generation.")
    latents.add_argument("images", metavar="IMAGES", help="a folder with train/CLASS and val/CLASS")
    latents.add_argument("folder", metavar="FOLDER", help="folder of the latents; a stopped command resumes there")
    latents.add_argument("--vae", required=True, help="a folder saved by diffusers, or a name on the Hugging Face hub")
    latents.add_argument("--size", type=int, default=256, help="height and width of the images in pixels (256)")
    speech = add("make-speech", _make_speech, "Let espeak-ng speak strings of digits, in LibriSpeech's layout.")
    speech.add_argument("folder", metavar="FOLDER", help="a new or empty folder; gets train/ and val/")
    speech.add_argument("--train", type=int, default=900, help="number of training utterances (900)")
    speech.add_argument("--val", type=int, default=120, help="number of utterances of voices never trained on (120)")
    speech.add_argument("--seed", type=int, default=0, help="seed of digits, speeds and pitches (0)")


def run(options: argparse.Namespace) -> int:
    return options.make(options) or 0


def _make_scenes(options: argparse.Namespace) -> None:
    from linvit.data.dense.scenes import make_scenes
    from linvit.runs.progress import tracked

    folder, total = options.folder, options.train + options.val
    scenes = make_scenes(folder, options.train, options.val, options.size, options.seed)
    count = sum(1 for _ in tracked(scenes, "scenes", total))
    print(f"{count} scenes: {folder}/detection is in COCO's format, {folder}/segmentation in ADE20K's.")


def _make_speech(options: argparse.Namespace) -> None:
    from linvit.data.speech.spoken_digits import make_speech
    from linvit.runs.progress import tracked

    folder, total = options.folder, options.train + options.val
    count = sum(1 for _ in tracked(make_speech(folder, options.train, options.val, options.seed), "utterances", total))
    print(f"{count} utterances: {folder}/train and {folder}/val are in LibriSpeech's layout.")


def _make_latents(options: argparse.Namespace) -> None:
    from linvit.data.generation.latents import make_latents

    for split, done, total in make_latents(options.images, options.folder, options.vae, options.size):
        print(f"{split}: {done:,} of {total:,} images", flush=True)
    print(f"{options.folder} contains the latents: train on them with data.name=latents data.root={options.folder}")


def _check(options: argparse.Namespace) -> int:
    from linvit.data.dense.check import check_dense
    from linvit.runs.progress import tracked

    checked = check_dense(options.path, options.labels, not options.boxes, tracked)
    _show(checked)
    problems = [problem for split in checked for problem in split.problems]
    if not problems:
        return 0
    heading = f"linvit: {len(problems)} problem{'s' if len(problems) > 1 else ''} found:"
    print(heading, *problems, sep="\n  ", file=sys.stderr)
    return SOME_FAILED


def _show(checked: list["Checked"]) -> None:
    """Prints one table for each kind of data."""
    for columns in dict.fromkeys(tuple(split.counts) for split in checked):
        splits = [split for split in checked if tuple(split.counts) == columns]
        show_rows([{"data": split.name, **split.counts, "problems": len(split.problems)} for split in splits])

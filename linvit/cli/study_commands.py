"""The commands that list, compare and measure, and those on data: their arguments, and what is called with them."""

import argparse
from pathlib import Path

from linvit.cli.failures import SOME_FAILED, say
from linvit.cli.run_commands import network_arguments


def models_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--family", help="only this family, such as ravlt or swin_tiny")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--recipes", metavar="PATH", nargs="+", help="what these recipes train, against their bases")
    which.add_argument("--sequence", action="store_true", help="decoders of language and other tokens")
    which.add_argument("--generation", action="store_true", help="image generators, beside the published size")
    which.add_argument("--speech", action="store_true", help="Conformers, beside the published size")
    which.add_argument("--dense", action="store_true", help="detectors and segmentors on RAVLT and MAViT")
    command.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def run_models(options: argparse.Namespace) -> int:
    from linvit.runs.listing import describe_all, describe_recipes, model_names, recipe_files, show, show_recipes

    if options.recipes and options.family:
        raise ValueError("--family and --recipes exclude each other: give one of them.")
    if options.recipes:
        rows, show = describe_recipes(recipe_files(options.recipes)), show_recipes
    elif options.sequence:
        from linvit.runs.listing_sequence import describe_sequences, show_sequences

        rows, show = describe_sequences(), show_sequences
    elif options.generation:
        from linvit.runs.listing_generation import describe_generators, show_generators

        rows, show = describe_generators(), show_generators
    elif options.speech:
        from linvit.runs.listing_speech import describe_conformers, show_conformers

        rows, show = describe_conformers(), show_conformers
    elif options.dense:
        from linvit.runs.listing_dense import describe_dense, show_dense

        rows, show = describe_dense(options.family), show_dense
    else:
        rows = describe_all(model_names(options.family))
    if options.json:
        import json

        print(json.dumps(rows))
    else:
        show(rows)
    return 0


def demo_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, default=Path("recipes/demo"), help="folder of recipes (recipes/demo)")
    command.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where runs and page go (runs/demo)")
    command.add_argument("--workers", type=int, default=2, help="networks trained at once, one thread each (2)")


def run_demo(options: argparse.Namespace) -> int:
    from linvit.studies.demo import PAGE, demo

    print(demo(options.recipes, options.folder, options.workers, say_line).to_markdown())
    print(f"{options.folder / PAGE} is the page to look at.")
    return 0


def analyze_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit analyze [rank | scores | magnitude | all] (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])"
        " [--images PATH ...] [--output FOLDER]"
    )
    command.add_argument("paths", metavar="WHAT", nargs="*", help="what to measure (all), then a run or a checkpoint")
    network_arguments(command)
    command.add_argument("--images", metavar="PATH", nargs="+", help="image files or folders (the run's held-out data)")
    command.add_argument("--output", metavar="FOLDER", help="where figures, numbers and page go (RUN/analysis)")
    command.add_argument("--layers", metavar="LAYER", nargs="+", help="names or numbers of attention layers (all)")
    command.add_argument("--count", type=int, default=64, help="how many images ranks are averaged over (64)")
    command.add_argument(
        "--query", type=float, nargs=2, default=(0.5, 0.5), metavar=("Y", "X"), help="whose scores are drawn (0.5 0.5)"
    )


def run_analyze(options: argparse.Namespace) -> int:
    from linvit.runs.analyze import ANALYSES, analyze

    known = (*ANALYSES, "all")
    names_analysis = bool(options.paths) and options.paths[0] in known
    what, paths = (options.paths[0], options.paths[1:]) if names_analysis else ("all", options.paths)
    if len(paths) > 1:
        raise ValueError(
            f"analyze got {' '.join(paths)}, expected one of {', '.join(known)} and one run or checkpoint."
        )
    page, complaints = analyze(
        what,
        paths[0] if paths else None,
        options.model,
        options.checkpoint,
        options.images,
        options.output,
        options.layers,
        options.count,
        tuple(options.query),
    )
    for complaint in complaints:
        say(f"linvit: {complaint}", SOME_FAILED)
    print(f"{page} is the page to look at.")
    return SOME_FAILED if complaints else 0


def study_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, default=Path("recipes/study"), help="their folder (recipes/study)")
    command.add_argument(
        "--folder", type=Path, default=Path("runs/study"), help="where runs and tables go (runs/study)"
    )
    command.add_argument("--seeds", type=int, default=5, help="seeds per variant (5)")
    command.add_argument("--workers", type=int, default=2, help="runs at once, one thread each (2)")
    command.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the marks of a .md file")


def run_study(options: argparse.Namespace) -> int:
    from linvit.studies import study

    study(options.recipes, options.folder, options.seeds, options.workers, options.write, say_line)
    print(
        f"{options.folder / 'study.md'} holds the tables and the verdicts, {options.folder / 'study.png'} the figure."
    )
    if options.write is not None:
        print(f"{options.write} has them between its marks.")
    return 0


def compare_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit compare RECIPE ... --folder FOLDER [--seeds N] [--workers N] [--over KEY=V,V,…] [--set KEY=V ...]"
        " [--also MEASURE ...]"
    )
    command.add_argument("recipes", metavar="RECIPE", nargs="+", type=Path, help="recipes of one task")
    command.add_argument("--folder", type=Path, required=True, help="where runs, table and figure go")
    command.add_argument("--seeds", type=int, default=3, help="seeds per recipe (3)")
    command.add_argument("--workers", type=int, default=1, help="runs at once, one thread each (1)")
    command.add_argument("--over", metavar="KEY=V,V,…", help="train at each of these values, with a figure over them")
    command.add_argument("--set", metavar="KEY=V", nargs="+", default=(), help="settings of every run")
    command.add_argument("--also", metavar="MEASURE", nargs="+", default=(), help="columns for these measures too")


def run_compare(options: argparse.Namespace) -> int:
    from linvit.studies import compare

    chosen = (options.seeds, options.workers, options.over, options.set, options.also, say_line)
    print(compare(options.recipes, options.folder, *chosen).to_markdown(), end="")
    return 0


def say_line(line: str) -> None:
    """Shows progress, at once."""
    print(line, flush=True)


def data_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit data (make-scenes FOLDER [--train N] [--val N] [--size N] [--seed N] | check FOLDER|FILE"
        " | make-latents IMAGES FOLDER --vae VAE [--size N] | make-speech FOLDER [--train N] [--val N] [--seed N])"
    )
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", prog="linvit data")
    text = "Write scenes of real handwritten digits, in COCO's format and in ADE20K's."
    scenes = actions.add_parser("make-scenes", help=text, description=text, allow_abbrev=False)
    scenes.add_argument("folder", metavar="FOLDER", help="a new or empty folder; detection/ and segmentation/ go there")
    scenes.add_argument("--train", type=int, default=1000, help="how many training scenes (1000)")
    scenes.add_argument("--val", type=int, default=200, help="how many validation scenes (200)")
    scenes.add_argument("--size", type=int, default=128, help="height and width in pixels (128)")
    scenes.add_argument("--seed", type=int, default=0, help="what the scenes are drawn from (0)")
    text = "Read every image and annotation of a data set and name what is wrong with them."
    check = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("path", metavar="FOLDER|FILE", type=Path, help="in COCO's or ADE20K's layout, or a COCO .json")
    check.add_argument("--boxes", action="store_true", help="objects have boxes alone: look for no masks")
    check.add_argument("--labels", type=int, help="number of classes of label maps (the folder's table, else 150)")
    text = "Encode an image folder with an autoencoder of diffusers, for image generators."
    latents = actions.add_parser("make-latents", help=text, description=text, allow_abbrev=False)
    latents.add_argument("images", metavar="IMAGES", help="a folder with train/CLASS and val/CLASS")
    latents.add_argument("folder", metavar="FOLDER", help="where the latents go; a stopped command goes on there")
    latents.add_argument(
        "--vae", required=True, help="a folder that diffusers wrote, or a name on the Hugging Face hub"
    )
    latents.add_argument("--size", type=int, default=256, help="height and width of the images in pixels (256)")
    text = "Let espeak-ng speak strings of digits, in LibriSpeech's layout."
    speech = actions.add_parser("make-speech", help=text, description=text, allow_abbrev=False)
    speech.add_argument("folder", metavar="FOLDER", help="a new or empty folder; train/ and val/ go there")
    speech.add_argument("--train", type=int, default=900, help="how many training utterances (900)")
    speech.add_argument("--val", type=int, default=120, help="how many utterances of voices never trained on (120)")
    speech.add_argument("--seed", type=int, default=0, help="what digits, speeds and pitches are drawn from (0)")


def run_data(options: argparse.Namespace) -> int:
    from linvit.cli.data import check, encode, make, show, speak

    if options.action == "make-latents":
        encode(options.images, options.folder, options.vae, options.size)
        return 0
    if options.action == "make-speech":
        speak(options.folder, options.train, options.val, options.seed)
        return 0
    if options.action == "make-scenes":
        make(options.folder, options.train, options.val, options.size, options.seed)
        return 0
    checked = check(options.path, options.labels, not options.boxes)
    show(checked)
    complaints = [complaint for part in checked for complaint in part.complaints]
    if complaints:
        listed = [f"  {complaint}" for complaint in complaints]
        return say("\n".join([f"linvit: {len(complaints)} things are wrong:", *listed]), SOME_FAILED)
    return 0

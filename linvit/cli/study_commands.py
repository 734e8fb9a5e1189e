"""The commands that list, compare and measure: their arguments, and what is called with them."""

import argparse
from pathlib import Path


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

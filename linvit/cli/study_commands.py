"""`linvit models`: its arguments, and what is called with them."""

import argparse


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

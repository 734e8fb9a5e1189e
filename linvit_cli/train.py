"""`linvit train`."""

import argparse

from linvit_cli.overrides import recipe_overrides

HELP = "Train what a recipe says; a stopped run resumes exactly where it was."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit train RECIPE [key.key=value ...] [--resume] [--compile] [--trust-recipe] [--print_config] [--debug]"
    )
    command.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a YAML file, or a name of `linvit recipes`; key.key=value or --key.key value overrides it",
    )
    command.add_argument("--resume", action="store_true", help="continue from the last checkpoint of the run's folder")
    command.add_argument("--compile", action="store_true", help="train through torch.compile; as task.compile=true")
    command.add_argument(
        "--trust-recipe",
        action="store_true",
        help="let the recipe run code of any package and write outside the run's folder",
    )
    command.add_argument("--print_config", action="store_true", help="print every value of the recipe and stop")


def run(options: argparse.Namespace) -> int:
    overrides = recipe_overrides(options.rest) + ["task.compile=true"] * options.compile
    if options.print_config:
        import yaml

        from linvit.runs.recipe import Recipe, read_recipe

        resolved = Recipe(read_recipe(options.recipe, overrides), trust=options.trust_recipe).resolved()
        print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
        return 0
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from linvit.runs.training import train_folder

    folder = train_folder(
        options.recipe, overrides, resume=options.resume, progress=True, trust_recipe=options.trust_recipe
    )
    if rank_zero_only.rank == 0:
        print(f"Done: {folder}/checkpoints holds best.ckpt and last.ckpt, {folder}/metrics.csv the curves.")
    return 0

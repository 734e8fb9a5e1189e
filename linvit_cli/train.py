"""`linvit train`."""

import argparse

from linvit_cli.run_arguments import recipe_overrides
from linvit_cli.streams import show

HELP = "Train a recipe; a stopped run resumes exactly where it was."
EXAMPLES = (
    "linvit train demo/ravlt_nano_digits trainer.max_epochs=3",
    "linvit train my.yaml --resume",
    "linvit train my.yaml seed=1 folder=runs/my-1",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit train RECIPE [key.key=value ...] [options]"
    text = "YAML file, or a name that `linvit recipes` lists; key.key=value changes a setting of it"
    command.add_argument("recipe", metavar="RECIPE", help=text)
    text = "continue from the last checkpoint in the run's folder"
    command.add_argument("--resume", action="store_true", help=text)
    text = "train through torch.compile, as task.compile=true does"
    command.add_argument("--compile", action="store_true", help=text)
    text = "let the recipe run code of any package and write outside the run's folder"
    command.add_argument("--trust-recipe", action="store_true", help=text)
    text = "print every setting of the recipe and stop"
    command.add_argument("--print_config", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    from linvit.runs.recipe import Recipe
    from linvit.runs.recipe_values import dump_yaml, read_recipe

    overrides = recipe_overrides(options.rest) + ["task.compile=true"] * options.compile
    values = read_recipe(options.recipe, overrides)
    recipe = Recipe(values, trust=options.trust_recipe)
    if options.print_config:
        show(dump_yaml(recipe.resolved()).rstrip("\n"))
        return 0
    from lightning.pytorch.utilities import rank_zero_only

    from linvit.runs.training import train_recipe

    folder = train_recipe(recipe, resume=options.resume, progress=True)
    written = ", ".join(sorted(path.name for path in (folder / "checkpoints").glob("*.ckpt")))
    done = f"Done: checkpoints ({written}) are in {folder}/checkpoints, curves in {folder}/metrics.csv."
    rank_zero_only(show)(done)
    return 0

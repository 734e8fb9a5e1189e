"""`linvit train`."""

import argparse

from linvit_cli.run_arguments import recipe_overrides
from linvit_cli.streams import show

HELP = "Train a recipe; a stopped run resumes exactly where it was."
EXAMPLES = (
    "linvit train demo/ravlt_nano_digits trainer.max_epochs=3",
    "linvit train my.yaml --resume",
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
    overrides = recipe_overrides(options.rest) + ["task.compile=true"] * options.compile
    if options.print_config:
        from linvit.runs.recipe import Recipe, read_recipe
        from linvit.runs.yaml_text import dump_yaml

        resolved = Recipe(read_recipe(options.recipe, overrides), trust=options.trust_recipe).resolved()
        show(dump_yaml(resolved).rstrip("\n"))
        return 0
    from lightning.pytorch.utilities import rank_zero_only

    from linvit.runs.training import train_folder

    folder = train_folder(
        options.recipe, overrides, resume=options.resume, progress=True, trust_recipe=options.trust_recipe
    )
    written = ", ".join(sorted(path.name for path in (folder / "checkpoints").glob("*.ckpt")))
    done = f"Done: checkpoints ({written}) are in {folder}/checkpoints, curves in {folder}/metrics.csv."
    rank_zero_only(show)(done)
    return 0

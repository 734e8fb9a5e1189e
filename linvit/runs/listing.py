"""Size and cost of the networks that recipes train, as rows of a table."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import timm

from linvit.analysis.cost import Cost, count_cost
from linvit.bundled import Rows, files_below, header, shown_name
from linvit.errors import keys_of, refuse
from linvit.models.by_name import create_classifier
from linvit.runs.progress import tracked
from linvit.runs.recipe_values import base_of, read_recipe


def compare_recipes(paths: Sequence[str | Path], progress: bool = False) -> Rows:
    """The classifiers that recipes train, compared with those of their bases.

    paths: files, folders (searched at any depth), or the names of bundled ones.

    Keys: recipe, those of Cost (at the recipe's size), published (the words of the recipe's header, None without), base
    (path of the recipe below, None if that names no network), more_parameters, more_macs (what the recipe's network has
    over its base's).
    """
    count = cache(_count)
    rows = []
    for file in tracked(recipe_files(paths), "Counting", progress=progress):
        cost, base = count(file.resolve()), base_of(file)
        base = base if base is not None and _names_classifier(base) else None
        below = count(base.resolve()) if base else None
        rows.append(
            {
                "recipe": shown_name(file),
                **asdict(cost),
                "published": header(file)["published"] or None,
                "base": shown_name(base) if base else None,
                "more_parameters": cost.parameters - below.parameters if below else None,
                "more_macs": cost.macs - below.macs if below else None,
            }
        )
    return rows


def recipe_files(paths: Sequence[str | Path]) -> list[Path]:
    """The recipes that name a classifier among the given files and below the given folders, or bundled ones by name."""
    files = [file for path in paths for file in files_below(path)]
    recipes = [file for file in files if _names_classifier(file)]
    refuse(
        not recipes and f"No recipe in {', '.join(map(str, paths))} names a model: give a recipe or a folder of them."
    )
    return recipes


def _names_classifier(file: Path) -> bool:
    values = read_recipe(file)
    task = (values.get("task") or {}).get("name", "classification")
    return task == "classification" and bool((values.get("model") or {}).get("name"))


def _count(file: Path) -> Cost:
    """Counted for colour images and the network's own number of classes, whatever data the recipe reads."""
    values = read_recipe(file)
    name = values["model"]["name"]
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"{file} names the model {name!r}, which timm does not know: `linvit models` lists ours.")
    size = (values.get("data") or {}).get("size", config.input_size[-1])
    with keys_of("model"):
        network = create_classifier({**values["model"], "device": "meta"}, config.num_classes, 3)
    return count_cost(network, (3, size, size))

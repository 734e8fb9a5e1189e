"""`linvit models`: every registered network, or what recipes train, with size, cost and published accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from linvit.analysis.cost import Cost, count_cost
from linvit.models.by_name import create_classifier
from linvit.models.published import PUBLISHED
from linvit.models.sequence import SIZES as SEQUENCES
from linvit.models.swapped import BASES
from linvit.runs.recipe import base_of, read_recipe
from linvit.runs.screen import show as show_table


def model_names(family: str | None = None) -> list[str]:
    """Names that linvit registers with timm, family by family; raises ValueError for an unknown family."""
    names = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("linvit.")]
    families = sorted({_family(name) for name in names})
    if family is not None and family not in families:
        raise ValueError(f"Unknown family {family!r}: the known ones are {', '.join(families)}.")
    return [name for name in names if family in (None, _family(name))]


def _family(name: str) -> str:
    return next((base for base in BASES if name.startswith(f"{base}_")), name.partition("_")[0])


def describe(name: str) -> dict[str, Any]:
    """name, parameters, macs, macs_attention, pattern, input_size, published_top1 (percent or None), released_weights.

    published_parameters (millions) and published_macs (billions) are there for swapped networks, as their sources print
    them, else None; macs are of convolutions and linear layers, as the papers count; macs_attention come on top (see
    analysis.cost).
    """
    network = timm.create_model(name, device="meta")
    config = network.pretrained_cfg
    cost = count_cost(network, config["input_size"])
    published = PUBLISHED.get(name)
    return {
        "name": name,
        "parameters": cost.parameters,
        "macs": cost.macs,
        "macs_attention": cost.macs_attention,
        "pattern": network.pattern,
        "input_size": list(config["input_size"]),
        "published_top1": published.top1 if published else None,
        "published_parameters": published.parameters if published else None,
        "published_macs": published.macs if published else None,
        "released_weights": bool(config.get("hf_hub_id") or config.get("url")),
    }


def describe_all(names: list[str]) -> list[dict[str, Any]]:
    """describe for each name, with a bar on stderr meanwhile, since counting takes about a second a model."""
    return [describe(name) for name in track(names, "Counting", console=Console(stderr=True), transient=True)]


def recipe_files(paths: Sequence[str | Path]) -> list[Path]:
    """The recipes that name a network among the given files and, recursively, in the given folders.

    Raises ValueError where there is none.
    """
    files = [file for path in map(Path, paths) for file in (sorted(path.rglob("*.yaml")) if path.is_dir() else [path])]
    found = [file for file in files if _model_of(file) is not None]
    if not found:
        raise ValueError(f"No recipe in {', '.join(map(str, paths))} names a model: give a recipe or a folder of them.")
    return found


def describe_recipes(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Each recipe's network against that of its base, with a bar on stderr meanwhile.

    Keys: recipe, parameters, macs, macs_attention (as in describe, at the recipe's size), published (the words of the
    recipe's header, None without), base (path of the recipe below, None where that names no network),
    more_parameters, more_macs (what the recipe's network has over its base's).
    """
    costs: dict[Path, Cost] = {}

    def cost_of(file: Path) -> Cost:
        if file.resolve() not in costs:
            costs[file.resolve()] = _count_recipe(file)
        return costs[file.resolve()]

    rows = []
    for file in track(files, "Counting", console=Console(stderr=True), transient=True):
        cost, base = cost_of(file), base_of(file)
        below = cost_of(base) if base is not None and _model_of(base) is not None else None
        rows.append(
            {
                "recipe": str(file),
                "parameters": cost.parameters,
                "macs": cost.macs,
                "macs_attention": cost.macs_attention,
                "published": _published(file),
                "base": str(base) if below else None,
                "more_parameters": cost.parameters - below.parameters if below else None,
                "more_macs": cost.macs - below.macs if below else None,
            }
        )
    return rows


def show_recipes(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table in Markdown."""
    table = Table(box=box.MARKDOWN)
    table.add_column("recipe")
    for heading in ("parameters", "against base", "MACs", "against base", "+ attention"):
        table.add_column(heading, justify="right")
    table.add_column("published")
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['parameters']:,}",
            "–" if row["base"] is None else f"{row['more_parameters']:+,}",
            _giga(row["macs"]),
            "–" if row["base"] is None else f"{row['more_macs'] / 1e9:+.3f} G",
            _giga(row["macs_attention"]),
            row["published"] or "–",
        )
    show_table(table)


def _model_of(file: Path) -> dict[str, Any] | None:
    model = read_recipe(file).get("model")
    return model if model and model.get("name") and model["name"] not in SEQUENCES else None


def _count_recipe(file: Path) -> Cost:
    """Of the network with its own number of classes, whatever data the recipe reads, for colour images."""
    values = read_recipe(file)
    name = values["model"]["name"]
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise ValueError(f"{file} names the model {name!r}, which timm does not know: `linvit models` lists ours.")
    size = (values.get("data") or {}).get("size", config.input_size[-1])
    network = create_classifier({**values["model"], "device": "meta"}, config.num_classes, 3)
    return count_cost(network, (3, size, size))


def _published(file: Path) -> str | None:
    """What the header says between `published:` and `ours:`."""
    line = next((line for line in file.read_text().splitlines() if line.startswith("# published: ")), None)
    return None if line is None else line.removeprefix("# published: ").partition("ours:")[0].strip()


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as one table."""
    table = Table(caption="MACs of one image at the size given: convolutions and linear layers, + attention products")
    for heading in ("model", "pattern"):
        table.add_column(heading)
    for heading in ("px", "parameters", "MACs", "+ attention", "published size", "top-1", "released weights"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            row["pattern"],
            str(row["input_size"][-1]),
            f"{row['parameters']:,}",
            _giga(row["macs"]),
            _giga(row["macs_attention"]),
            _published_size(row),
            f"{row['published_top1']} %" if row["published_top1"] else "–",
            "yes" if row["released_weights"] else "–",
        )
    show_table(table)


def _published_size(row: dict[str, Any]) -> str:
    values = (row["published_parameters"], "M"), (row["published_macs"], "G")
    return " / ".join(f"{value} {unit}" if value else "–" for value, unit in values) if values[0][0] else "–"


def _giga(macs: int) -> str:
    return f"{macs / 1e9:.3f} G"

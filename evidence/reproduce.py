"""The tables of docs/evidence/reproduce.md, from the headers of the recipes, reproduce.yaml and measured throughput."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from evidence.gpu.jobs import ROWS as MEASURED
from evidence.gpu.networks import IMAGENET
from evidence.gpu.rows import newest, read
from evidence.published import ROWS
from evidence.rows import EVIDENCE
from linvit.analysis.markdown import markdown_table, replace_between_marks
from linvit.bundled import bundled_files, header
from linvit.runs.recipe_values import read_recipe

PAGE = EVIDENCE / "reproduce.md"
ITEMS: dict[str, list[list[str]]] = yaml.safe_load(Path(__file__).with_name("reproduce.yaml").read_text("utf-8"))
"""Paper → [name, what it shows, how, state] of each table, figure and section."""

ITEM_HEADS, ROW_HEADS = ("item", "what", "command", "state"), ("row", "recipe", "published", "ours", "cost")
NOT_RUN = "not run yet"
HOURS = re.compile(r"about ([\d.]+) (\w+) hours")
DATA = {  # of trainings with the papers' data
    "imagefolder": "ImageNet-1k",
    "coco": "COCO 2017",
    "ade20k": "ADE20K",
    "librispeech": "LibriSpeech",
    "huggingface": "a data set such as SlimPajama",
    "latents": "latents of ImageNet-1k",
}


class Row(NamedTuple):
    """A row of a published table, and the recipe that trains its network."""

    citation: str
    table: str
    name: str
    published: str
    recipe: str
    command: str
    data: str
    ours: str
    cost: str


class Rate(NamedTuple):
    """Images per second of training that one GPU reached; `where` says in what."""

    gpu: str
    images: float
    where: str


def throughput(folder: Path) -> dict[str, Rate]:
    """Network → the newest rate of its training at 224 px: with the loader where that was measured, else of a step."""
    rates = {}
    for job, heading, where in (
        ("sizes", "images/s", "in steps without a loader"),
        ("published", "images/s with the loader", "with the loader"),
    ):
        for row in newest(read(folder, job)).values():
            measured = row.get("cells", ()) if job == "published" or row["case"].startswith("training ") else ()
            gpu = re.search(r"[A-Z]*\d\w*", row["card"])  # H200 of "NVIDIA H200"
            for cells in measured:
                if gpu and cells.get(heading):
                    rates[cells["network"]] = Rate(gpu[0], cells[heading], where)
    return rates


def measured_cost(values: Mapping[str, Any], rates: Mapping[str, Rate]) -> str:
    """The cost of a training on ImageNet-1k by the rate of its network; "" without one.

    The rate of a network does not tell that of other attention in it, or of a training with a teacher.
    """
    rate = rates.get(values["model"].get("name", ""))
    plain = values["model"].keys() <= {"name", "drop_path_rate"} and "distillation" not in values
    if rate is None or not plain or values["data"]["name"] != "imagefolder":
        return ""
    hours = values["trainer"]["max_epochs"] * IMAGENET / rate.images / 3600
    return f"about {hours:.0f} {rate.gpu} hours, measured: {rate.images:,.0f} images/s {rate.where}"


def sections(measured: Path = MEASURED) -> dict[str, str]:
    """What stands between the marks of the page, by their names. measured: the folder of the rows of GPU jobs."""
    rows = recipe_rows(measured)
    tables = {table: [row for row in rows if row.table == table] for table in dict.fromkeys(row.table for row in rows)}
    texts = {"total": _total(rows)}
    for paper, items in ITEMS.items():
        cells = [_cells(item, tables.get(f"{paper}, {item[0].partition(' (')[0]}", [])) for item in items]
        texts[paper] = f"{markdown_table(ITEM_HEADS, cells, left=4)}\n"
    texts["recipes"] = "\n".join(_of_table(*table) for table in tables.items())
    return texts


def marks(name: str) -> tuple[str, str]:
    """The lines of the page that enclose a section."""
    return f"<!-- reproduce {name}:begin -->", f"<!-- reproduce {name}:end -->"


def recipe_rows(measured: Path = MEASURED) -> list[Row]:
    """What the headers cite, in the order of the papers' tables. measured: see `sections`."""
    order, rates = [*ROWS], throughput(measured)
    rows = [row for name, file in bundled_files().items() for row in _cited(name, file, rates)]
    papers = [*ITEMS]

    def place(row: Row) -> tuple[int, int, int, bool]:
        paper, table = re.findall(r"^(\w+), Table (\d+)", row.table)[0]
        number = order.index(row.citation) if row.citation in ROWS else len(order)
        return papers.index(paper), int(table), number, row.recipe.startswith("dense")

    return sorted(rows, key=place)


def _cited(name: str, file: Path, rates: Mapping[str, Rate]) -> Iterator[Row]:
    """The rows of the papers that a recipe cites, if it trains on the papers' data."""
    about, values = header(file), read_recipe(file)
    data, cost = values["data"]["name"], measured_cost(values, rates) or about["cost"].partition(" (")[0]
    for published in about["published"].split("; "):
        numbers, _, citation = published.removesuffix(")").partition(" (")
        paper, _, place = citation.partition(", ")
        table, _, row = place.partition(", ")
        if data in DATA and paper in ITEMS and table.startswith("Table "):
            row = row or about["about"].partition(", ImageNet")[0]  # of a table whose numbers are not known
            yield Row(
                citation, f"{paper}, {table}", row, numbers, name, about["command"], DATA[data], about["ours"], cost
            )


def _total(rows: Sequence[Row]) -> str:
    costs = {row.recipe: row.cost for row in rows}
    done = len({row.recipe for row in rows if row.ours != NOT_RUN})
    estimated = [
        hours for cost in costs.values() if "images/s" not in cost for hours in hours_by_gpu([cost]).get("A100", ())
    ]
    measured = hours_by_gpu(cost for cost in costs.values() if "images/s" in cost)
    return (
        f"Trainings of the papers: {len(costs)}; run here: {done or 'none'}. Those with an estimate in A100 hours,"
        f" {len(estimated)}, take {sum(estimated):,.0f} of them together."
        + "".join(
            f" With measured throughput {len(x)} more take {sum(x):,.0f} {gpu} hours." for gpu, x in measured.items()
        )
        + "\n"
    )


def hours_by_gpu(costs: Iterable[str]) -> dict[str, list[float]]:
    """GPU → the hours on it, ascending."""
    hours: dict[str, list[float]] = {}
    for cost in costs:
        if match := HOURS.search(cost):
            hours.setdefault(match[2], []).append(float(match[1]))
    return {gpu: sorted(listed) for gpu, listed in hours.items()}


def _cells(item: Sequence[str], rows: Sequence[Row]) -> list[str]:
    name, shows, how, state = item
    if rows:
        anchor = re.sub(r"[^\w ]", "", rows[0].table.lower()).replace(" ", "-")
        count = len({row.recipe for row in rows})
        train = f"`{rows[0].command}` ([{count} recipe{'s' * (count > 1)}](#{anchor}))"
        how = (how or "{train}").format(train=train)
        done = len({row.recipe for row in rows} - {row.recipe for row in rows if row.ours == NOT_RUN})
        run = f"{done} of {count} run" if done else "not run"
        state = "; ".join([run, ", ".join(dict.fromkeys(row.data for row in rows)), _cost(rows)])
    return [name, shows, how, state]


def _cost(rows: Sequence[Row]) -> str:
    """Such as "20 to 140 A100 hours each"."""
    limits = {
        gpu: f"{x[0]:g} to {x[-1]:g}" if x[0] < x[-1] else f"{x[0]:g}"
        for gpu, x in hours_by_gpu(row.cost for row in rows).items()
    }
    return ", ".join(f"{hours} {gpu} hours each" for gpu, hours in limits.items()) or "hours not estimated"


def _of_table(table: str, rows: Sequence[Row]) -> str:
    cells = [
        (row.name, f"`{row.recipe}`", row.published, row.ours.replace(NOT_RUN, "not run"), row.cost) for row in rows
    ]
    return f"### {table}\n\n{markdown_table(ROW_HEADS, cells, left=len(ROW_HEADS))}\n"


def write() -> None:
    """Writes the tables between their marks."""
    for name, text in sections().items():
        replace_between_marks(PAGE, f"\n{text}\n", *marks(name))

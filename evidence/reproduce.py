"""The tables of docs/evidence/reproduce.md, from the headers of the recipes and reproduce.yaml."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

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


def sections() -> dict[str, str]:
    """What stands between the marks of the page, by their names."""
    rows = list(_rows())
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


def _rows() -> list[Row]:
    """What the headers cite, in the order of the papers' tables."""
    order = [*ROWS]
    rows = [row for name, file in bundled_files().items() for row in _cited(name, file)]
    papers = [*ITEMS]

    def place(row: Row) -> tuple[int, int, int, bool]:
        paper, table = re.findall(r"^(\w+), Table (\d+)", row.table)[0]
        number = order.index(row.citation) if row.citation in ROWS else len(order)
        return papers.index(paper), int(table), number, row.recipe.startswith("dense")

    return sorted(rows, key=place)


def _cited(name: str, file: Path) -> Iterator[Row]:
    """The rows of the papers that a recipe cites, if it trains on the papers' data."""
    about, data = header(file), read_recipe(file)["data"]["name"]
    for published in about["published"].split("; "):
        numbers, _, citation = published.removesuffix(")").partition(" (")
        paper, _, place = citation.partition(", ")
        table, _, row = place.partition(", ")
        if data in DATA and paper in ITEMS and table.startswith("Table "):
            row = row or about["about"].partition(", ImageNet")[0]  # of a table whose numbers are not known
            cost = about["cost"].partition(" (")[0]
            yield Row(
                citation, f"{paper}, {table}", row, numbers, name, about["command"], DATA[data], about["ours"], cost
            )


def _total(rows: Sequence[Row]) -> str:
    costs = {row.recipe: HOURS.search(row.cost) for row in rows}
    hours = [float(match[1]) for match in costs.values() if match and match[2] == "A100"]
    done = len({row.recipe for row in rows if row.ours != NOT_RUN})
    return (
        f"Trainings of the papers: {len(costs)}; run here: {done or 'none'}. Those with an estimate in A100 hours,"
        f" {len(hours)}, take {sum(hours):,.0f} of them together.\n"
    )


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
    matches = [match for row in rows if (match := HOURS.search(row.cost))]
    if not matches:
        return "hours not estimated"
    hours = sorted({float(match[1]) for match in matches})
    return f"{' to '.join(f'{limit:g}' for limit in dict.fromkeys([hours[0], hours[-1]]))} {matches[0][2]} hours each"


def _of_table(table: str, rows: Sequence[Row]) -> str:
    cells = [
        (row.name, f"`{row.recipe}`", row.published, row.ours.replace(NOT_RUN, "not run"), row.cost) for row in rows
    ]
    return f"### {table}\n\n{markdown_table(ROW_HEADS, cells, left=len(ROW_HEADS))}\n"


def write() -> None:
    """Writes the tables between their marks."""
    for name, text in sections().items():
        replace_between_marks(PAGE, f"\n{text}\n", *marks(name))

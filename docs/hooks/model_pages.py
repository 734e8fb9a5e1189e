"""The page of all networks, and a model card for each network of timm."""

from model_cards import network_card

from linvit.analysis.markdown import markdown_rows
from linvit.bundled import caption, list_networks
from linvit.runs.tasks import RUNS
from linvit_cli.models import readable

INTRODUCTION = """# Networks

Every network with its size and cost, as `linvit models` prints them. Those for classification are timm models, each
with a model card; `features_only=True` makes them backbones. MACs are multiply-accumulates.
"""


def pages() -> dict[str, str]:
    """Each page as Markdown, by its path below reference/models."""
    names = [row["name"] for row in list_networks()]
    return {"index.md": _index(), **{f"{name}.md": network_card(name) for name in names}}


def _index() -> str:
    lines, seen = [INTRODUCTION], set()
    for task in RUNS:
        rows = readable(list_networks(task))
        key = markdown_rows([{k: v for k, v in row.items() if k != "weights"} for row in rows], left=2) if rows else ""
        if not rows or key in seen:
            continue
        seen.add(key)
        if task == "classification":
            rows = [{**row, "model": f"[`{row['model']}`]({row['model']}.md)"} for row in rows]
        lines += [
            f"## {task[0].upper()}{task[1:]}\n",
            markdown_rows(rows, left=2),
            f"\n{caption(task)}.\n".replace("..", "."),
        ]
    return "\n".join(lines)

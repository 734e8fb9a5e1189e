"""The page of all recipes, from their headers and values."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from linvit.analysis.markdown import markdown_table
from linvit.bundled import bundled_files, header
from linvit.runs.recipe import read_recipe

INTRODUCTION = """# Recipes

The recipes that come with linvit. `linvit train NAME` trains one of them, `linvit recipes WORD …` shows the published
and measured results, the cost and the command of those that match, and `key.key=value` changes a setting.
"""
ABOUT = {
    "care": "CARE",
    "demo": "Demo",
    "dense": "Detection and segmentation",
    "evidence": "Evidence on real images",
    "generation": "Image generation",
    "language": "Language",
    "linearize": "From softmax to linear",
    "mavit": "MAViT",
    "mechanisms": "DeiT and Swin with other attention",
    "multilabel": "Several labels per image",
    "pretrain": "Backbones of the evidence",
    "ravlt": "RAVLT",
    "speech": "Speech",
    "study": "The study on digits",
    "weights": "Bundled weights",
}
HEAD = ("recipe", "task", "network", "data", "for")


def page() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION]
    for folder, group in groupby(bundled_files().items(), key=lambda item: item[0].partition("/")[0]):
        rows = [_row(name, read_recipe(file), header(file)["about"]) for name, file in group]
        lines += [f"## {ABOUT[folder]}\n", markdown_table(HEAD, rows, left=len(HEAD)), ""]
    return "\n".join(lines)


def _row(name: str, values: Mapping[str, Any], about: str) -> list[str]:
    task = values.get("task", {}).get("name", "classification")
    data = values.get("data", {}).get("name", "")
    return [f"`{name}`", task, ", ".join(_networks(values)), data, about.replace("<", "&lt;")]


def _networks(values: Mapping[str, Any]) -> Iterator[str]:
    model = values.get("model", {})
    for key in ("name", "mechanism", "framework", "backbone", "attention"):
        if isinstance(model.get(key), str):
            yield f"`{model[key]}`"

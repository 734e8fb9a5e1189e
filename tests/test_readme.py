"""The README's code runs, and its table is what the package computes."""

import re
from pathlib import Path

from linvit.bundled import list_networks
from linvit_cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_its_code_runs():
    (code,) = blocks("python")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["logits"].shape == (1, 10)
    assert names["vit"].mechanism == "mala"
    assert names["out"].shape == (1, 4, 196, 32)


def test_shell_blocks_name_existing_commands_and_goals():
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert len(lines) > 5
    goals = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in lines:
        assert words[:2] == ["pip", "install"] or words[1] in (COMMANDS if words[0] == "linvit" else goals)


def test_table_is_what_the_package_computes():
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([\d,]+) \| ([\d.]+) G \| ([\d.]+) G \| ([\d.]+) % \|", README, re.MULTILINE
    )
    assert len(rows) == 11
    models = {row["name"]: row for family in ("ravlt", "mavit", "care") for row in list_networks(family=family)}
    for name, pattern, parameters, macs, attention, published in rows:
        model = models[name]
        assert pattern == model["pattern"]
        assert parameters == f"{model['parameters']:,}"
        assert macs == f"{model['macs'] / 1e9:.2f}"
        assert attention == f"{model['macs_attention'] / 1e9:.2f}"
        assert float(published) == model["published_top1"]


def test_readme_is_short():
    assert len(README.splitlines()) <= 120

"""The code of docs/timm.md runs, from top to bottom."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "timm.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(blocks, folder, monkeypatch):
    assert len(BLOCKS) == 5
    monkeypatch.chdir(folder)
    names = {}
    for block in blocks:
        exec(compile(block, "timm.md", "exec"), names)
    return names


def test_all_but_the_exports_run(tmp_path, monkeypatch):
    names = run(BLOCKS[:4], tmp_path, monkeypatch)
    assert names["logits"].shape == (2, 10)
    assert (names["again"].num_classes, names["again"].pattern) == (9, "LLSS")


@pytest.mark.slow
def test_the_exports_run(tmp_path, monkeypatch):
    names = run((BLOCKS[0], BLOCKS[4]), tmp_path, monkeypatch)
    x = names["x"]
    assert names["compiled"](x).shape == names["program"].module()(x).shape == (2, 1000)

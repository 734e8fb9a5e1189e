"""The code of docs/use/timm.md runs, from top to bottom."""

import re
from pathlib import Path

import pytest
from stand_in_weights import write_stand_ins

PAGE = (Path(__file__).parents[1] / "docs" / "use" / "timm.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(blocks, folder, monkeypatch):
    assert len(BLOCKS) == 6
    monkeypatch.chdir(folder)
    names = {}
    for block in blocks:
        exec(compile(block, "timm.md", "exec"), names)
    return names


def test_all_but_the_exports_run(tmp_path, monkeypatch):
    write_stand_ins(tmp_path, monkeypatch)
    names = run(BLOCKS[:5], tmp_path, monkeypatch)
    assert names["logits"].shape == (2, 10)
    assert (names["names"][0], names["tuned"].num_classes) == ("airplane", 7)
    assert (names["again"].num_classes, names["again"].pattern) == (9, "LLSS")


@pytest.mark.slow
def test_the_exports_run(tmp_path, monkeypatch):
    names = run((BLOCKS[0], BLOCKS[5]), tmp_path, monkeypatch)
    x = names["x"]
    assert names["compiled"](x).shape == names["program"].module()(x).shape == (2, 1000)

"""The code of docs/timm.md runs, from top to bottom."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "timm.md").read_text()


def test_python_blocks_run_in_turn(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, "timm.md", "exec"), names)
    assert names["logits"].shape == (2, 10)
    assert (names["again"].num_classes, names["again"].pattern) == (9, "LLSS")
    assert names["compiled"](names["x"]).shape == names["program"].module()(names["x"]).shape == (2, 1000)

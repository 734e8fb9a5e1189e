"""The code of docs/use/streaming.md runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "use" / "streaming.md").read_text()


def test_it_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(compile(block, "streaming.md", "exec"), names)
    assert names["logits"].shape == (1, 10)
    assert names["coarse"].shape[2:] == (3, 7)
    assert names["row"].shape[2:] == (75, 50)

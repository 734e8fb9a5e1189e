"""The code of docs/use/transformers.md runs, from top to bottom, and the page names the tested architectures."""

import re
from pathlib import Path

import pytest
import torch

from linvit.models.hugging_face import attention_layers

pytest.importorskip("transformers", reason="needs the extra hf")

from tiny_transformers import ARCHITECTURES


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "use" / "transformers.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(block, names)
    assert names["tokens"].shape == (1, 17, 64)
    assert names["again"].config._attn_implementation == "linvit:rala"
    assert names["softmax"].config._attn_implementation == "sdpa"
    assert names["both"].config.vision_config._attn_implementation == "linvit:mala"
    assert len(names["errors"]) == 2
    assert [letter.index for letter in names["plan"].letters] == [0, 1]
    assert (tmp_path / "plan" / "report.html").is_file()
    for model in (names["classifier"], names["tuned"]):
        assert model.config._attn_implementation == "linvit:mala:LS"
        assert [layer.letter for layer in attention_layers(model)] == ["L", "S"]
    pixels = names["example"]["pixel_values"]
    assert torch.equal(names["tuned"](pixels).logits, names["classifier"].eval()(pixels).logits)
    for architecture in ARCHITECTURES:
        assert architecture.replace(" text", "") in page

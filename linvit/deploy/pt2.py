"""Whether a .pt2 file can be opened without running code of whoever wrote it.

torch.export.load unpickles, evaluates expressions of sizes and looks up operators by name in torch itself, so a file
that contains anything but what linvit writes is refused before.
"""

import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from linvit.deploy.facts import FactsError

FILES = re.compile(
    r"data/(weights/(weight_\d+|model_weights_config\.json)|constants/(tensor_\d+|model_constants_config\.json)"
    r"|sample_inputs/model\.pt)|models/model\.json|extra/linvit|archive_(format|version)|byteorder"
    r"|\.data/(version|serialization_id)"
)
OPERATOR = re.compile(r"torch\.ops\.aten\.\w+\.\w+|_operator\.(add|sub|mul|floordiv|mod|neg|eq|ne|lt|le|gt|ge|getitem)")
NAMES = {"Symbol", "Integer", "Mul", "Add", "Pow", "Max", "Min", "FloorDiv", "Mod", "positive", "integer", "True"}
SIZE = re.compile(r"[\w\s(),'=*/+-]*")
SYMBOL = re.compile(r"s\d+")


def check_plain(path: Path) -> None:
    """Raises ValueError for a file with other contents than weights, operators of torch and arithmetic of sizes."""
    with ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if any(name.startswith("data/aotinductor/") for name in names):
            raise FactsError(
                f"{path} contains machine code, which linvit never runs: if you trust it, load it with"
                " torch._inductor.aoti_load_package."
            )
        foreign = [name for name in names if not FILES.fullmatch(name)]
        for group in ("weights", "constants"):
            config = json.loads(archive.read(names[f"data/{group}/model_{group}_config.json"]))["config"]
            foreign += [name for name, about in config.items() if about["use_pickle"]]
        torch.load(BytesIO(archive.read(names["data/sample_inputs/model.pt"])), weights_only=True)
        graph = json.loads(archive.read(names["models/model.json"]))
    foreign += [text for key, text in _texts(graph) if not _is_plain(key, text)]
    if foreign:
        raise ValueError(f"it contains {foreign[0][:80]!r}, which linvit does not write")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a JSON document, with the key that it belongs to."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def _is_plain(key: str, text: str) -> bool:
    if key == "target":
        return OPERATOR.fullmatch(text) is not None
    if key == "expr_str":
        words = re.findall(r"[A-Za-z_]\w*", text)
        return SIZE.fullmatch(text) is not None and all(word in NAMES or SYMBOL.fullmatch(word) for word in words)
    return True

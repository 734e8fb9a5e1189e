"""A model card for each network of timm that linvit registers."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import resolve_pretrained_cfg

from evidence.published import CONTENT, ROWS, Row
from linvit import models
from linvit.analysis.markdown import markdown_table
from linvit.bundled import list_networks
from linvit.layers.mechanisms import MECHANISMS
from linvit.models.by_name import check_model, is_ours
from linvit.runs.weight_file import creation, model_card

BIBTEX = Path(inspect.getfile(models)).with_name("papers.bib").read_text(encoding="utf-8")
PAPERS = {"ravlt": "fan2025rala", "mavit": "fan2025mala", "care": "zhou2025care"}
BY_MECHANISM = {"rala": ("ravlt",), "mala": ("mavit",), "rala_mala": ("ravlt", "mavit")}
BUNDLED, LICENSE, UNSTATED = "cifar10", "apache-2.0", "unknown"
MACS = ("macs", "macs_attention")
UNTRAINED = "No weights are published for this network: it starts from random ones."
RELEASED = (
    "The authors offer weights for ImageNet-1k and state no licence for them; `linvit.load_released` reads their file."
)


def network_card(name: str) -> str:
    """The card of a network of linvit, by its name in timm, such as "ravlt_tiny" or "deit_tiny_mala".

    Sizes are counted; accuracies are those that its authors published, with their source.

    Raises ValueError for a name that linvit does not have.
    """
    check_model(name)
    rows = {row["name"]: row for row in list_networks()}
    if not is_ours(name) or name not in rows:
        raise ValueError(f"{name!r} is not a network of linvit: `linvit models` lists them.")
    row = rows[name]
    sections = {"Facts": _facts(row), "Create it": creation(name, num_classes=10), "Weights": _weights(row)}
    if published := _published(name, row["pattern"]):
        sections["Published values"] = published
    sections["Cite"] = f"```bibtex\n{bibtex(name)}```"
    released = _released(row)
    datasets = ["imagenet-1k"] if released else [BUNDLED] if row["weights"] == BUNDLED else []
    family = str(row["family"]).replace("_", "-")
    license = UNSTATED if released else LICENSE
    return model_card(name, _about(row), sections, license=license, datasets=datasets or None, tags=[family])


def bibtex(name: str) -> str:
    """The entries of the papers to cite for a network; all three if it is not from a single one."""
    families = BY_MECHANISM.get(_mechanism(name), (name.partition("_")[0],))
    keys = [PAPERS[family] for family in families if family in PAPERS]
    entries = [f"@{entry.strip()}\n" for entry in BIBTEX.split("@") if entry.strip()]
    return "\n".join(entry for entry in entries if not keys or any(f"{{{key}," in entry for key in keys))


def _mechanism(name: str) -> str:
    name = name.removesuffix(models.swap.PADDED)
    return next((name.removeprefix(f"{base}_") for base in models.swap.BASES if name.startswith(f"{base}_")), "")


def _about(row: Mapping[str, Any]) -> str:
    """What the network is: the first paragraphs of its family's module, or its mechanism."""
    mechanism = _mechanism(row["name"])
    if not mechanism:
        family = inspect.getdoc(sys.modules[timm.model_entrypoint(row["name"]).__module__])
        return str(family).partition("Axes:")[0]
    axes = MECHANISMS[mechanism].axes
    if MECHANISMS[mechanism].nonlinear:
        return f"timm's {row['family']} with `{mechanism}`, a nonlinear read, in place of softmax attention."
    if axes is None:
        return f"timm's {row['family']}, with softmax attention (`{mechanism}`)."
    known = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide", **axes}
    shown = ", ".join(f"{axis.replace('_', ' ')} `{value}`" for axis, value in known.items())
    return f"timm's {row['family']} with the attention `{mechanism}` in place of softmax attention: {shown}."


def _facts(row: Mapping[str, Any]) -> str:
    channels, height, width = row["input_size"]
    macs, products = (f"{row[key] / 1e9:.3f} G" if row[key] >= 1e8 else f"{row[key] / 1e6:.2f} M" for key in MACS)
    facts = {
        "parameters": f"{row['parameters']:,}, for {resolve_pretrained_cfg(row['name']).num_classes:,} classes",
        "multiply-accumulates": f"{macs}, and {products} inside the attention",
        "image": f"{channels}×{height}×{width} px",
        "attention": f"`{row['pattern']}` by stage (L linear, S softmax, C strip convolutions)",
    }
    return markdown_table(("", ""), list(facts.items()), left=2)


def _released(row: Mapping[str, Any]) -> bool:
    """Whether the authors of the family give weights for this network."""
    return row["family"] in PAPERS and row["published_top1"] is not None


def _weights(row: Mapping[str, Any]) -> str:
    name = row["name"]
    if row["weights"] == BUNDLED:
        tagged = f"{name}.{BUNDLED}"
        return f"`{tagged}` comes with linvit, trained on CIFAR-10 ({LICENSE}).\n\n{creation(tagged, pretrained=True)}"
    if not _released(row):
        return UNTRAINED
    config = resolve_pretrained_cfg(name)
    hub = f" `pretrained=True` downloads `{config.hf_hub_filename}` from `{config.hf_hub_id}` on the hub."
    guessed = " The name of that file is a guess." if row["family"] == "mavit" else ""
    return RELEASED + (hub + guessed if config.hf_hub_id else "")


def _published(name: str, pattern: str) -> str:
    """What its authors print for the network, in all tables of the same sources; "" if they print nothing."""
    cited = [ROWS[citation] for citation in CONTENT["networks"].get(name, ())]
    if not cited:
        return ""
    sources = {_source(row) for row in cited}
    printed = [row for row in ROWS.values() if _source(row) in sources and row.name in {row.name for row in cited}]
    rows = []
    for row in printed:
        source, _, place = row.table.partition(", ")
        rows.append([row.table, str(CONTENT["papers"][source]["tables"][place]["about"]), ", ".join(row.cells())])
    note = f"As printed by the sources, for the pattern `{pattern}`. linvit has not trained this network.\n\n"
    return note + markdown_table(("source", "about", "values"), rows, left=3)


def _source(row: Row) -> str:
    return row.table.partition(", ")[0]

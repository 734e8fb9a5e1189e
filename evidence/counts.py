"""The rows of `linvit models`: size and cost of the networks of every task, counted and stored in the package."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import timm
import torch

from evidence.dense_cost import count_dense_cost, dense_row
from evidence.published import FLOPS, PUBLISHED, ROWS, SIZE
from linvit.analysis.cost import count_batch, count_cost
from linvit.bundled import NETWORKS
from linvit.files import write_json
from linvit.layers.mechanisms import at
from linvit.models.by_name import bundled_weights, create, is_ours
from linvit.models.dense.frameworks import DETECTORS, SEGMENTORS
from linvit.models.dit import DiT
from linvit.models.sequence import SIZES, Decoder, DecoderCache
from linvit.models.swap import BASES, NAMES
from linvit.models.swap import NAME as LINEARIZED
from linvit.runs.progress import tracked

Row = dict[str, Any]
BACKBONES = [f"{family}_{size}" for family in ("ravlt", "mavit") for size in ("tiny", "small", "base", "large")]
VOCABULARIES = {"sequence_nano": 257, "sequence_340m": 32_000}
CONTEXT = 2048
TOKENS = {"conformer_nano": 11, "conformer_small": 1024}
VARIANTS: dict[str, dict[str, Any]] = {  # further arguments of dit_small_patch2
    "DiT-S/2": {},
    "with local=true": {"local": True},
    "with mlp_ratio=2": {"mlp_ratio": 2.0},
    "with both": {"local": True, "mlp_ratio": 2.0},
}
PRINTED = {
    "conformer_small": {"softmax": "Conformer (S)", "linear": "Linear Attn", "mala": "MALA"},
    "DiT-S/2": {"softmax": "DiT-S/2"},
}
"""The rows of MALA's tables 7 and 8 that print these networks, by name and mechanism."""


def model_names() -> list[str]:
    """The names that linvit registers with timm, by family.

    Without "linearized", which is any network converted, and those of a user's mechanisms.
    """
    of_users = {name for name in timm.list_models() if name.startswith(tuple(f"{base}_" for base in BASES))} - {*NAMES}
    return [name for name in timm.list_models() if is_ours(name) and name != LINEARIZED and name not in of_users]


def classifiers() -> Iterator[Row]:
    """The networks that linvit registers with timm, by family.

    Keys: name, those of Cost, pattern, input_size, published_top1 (percent), published_parameters (millions) and
    published_macs (billions) as printed in the papers, None if they are not, weights (timm's tag of the weights:
    cifar10 for those that come with linvit; None if there are none) and family.
    """
    for name in model_names():
        network = timm.create_model(name, device="meta")
        config = cast(Mapping[str, Any], network.pretrained_cfg)
        published = PUBLISHED.get(name)
        weights = timm.list_pretrained(f"{name}.*")  # on a hub, or files in this copy of linvit
        tagged = [(full.partition(".")[2], bundled_weights(full)) for full in weights]
        yield {
            "name": name,
            **asdict(count_cost(network, config["input_size"])),
            "pattern": network.pattern,
            "input_size": list(config["input_size"]),
            "published_top1": published.top1 if published else None,
            "published_parameters": published.parameters if published else None,
            "published_macs": published.macs if published else None,
            "weights": next((tag for tag, file in tagged if file is None or file.is_file()), None),
            "family": next((base for base in BASES if name.startswith(f"{base}_")), name.partition("_")[0]),
        }


def dense(frameworks: Mapping[str, Any]) -> Iterator[Row]:
    """Every framework on every size of RAVLT and MAViT, as released (pattern LLSS) and linear throughout (LLLL)."""
    patterns = {"LLSS": "", "LLLL": "_linear"}
    for framework, body, (pattern, suffix) in itertools.product(frameworks, BACKBONES, patterns.items()):
        backbone = f"{body}{suffix}"
        published = dense_row(framework, backbone)
        values = published.values if published else {}
        yield {
            "framework": framework,
            "backbone": backbone,
            "pattern": pattern,
            **asdict(count_dense_cost(framework, backbone)),
            "published_parameters": values.get(SIZE),
            "published_macs": values.get(FLOPS),
            "family": body.partition("_")[0],
        }


def decoders() -> Iterator[Row]:
    """Decoders with each mechanism; memory: bytes of the state after CONTEXT tokens; grows: whether that depends on
    the number of tokens."""
    for name, (mechanism, entry) in itertools.product(SIZES, at("sequences").items()):
        memory = DecoderCache()
        with torch.device("meta"):
            network = create(name, VOCABULARIES[name], mechanism=mechanism)
            cast(Decoder, network).read(torch.zeros(1, CONTEXT, dtype=torch.long), memory)
        yield {
            "name": name,
            "mechanism": mechanism,
            "vocabulary": VOCABULARIES[name],
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "memory": memory.num_bytes(),
            "grows": entry.axes is None,
        }


def conformers() -> Iterator[Row]:
    """Conformers with each mechanism, and their parameters with either head."""
    for (name, tokens), mechanism in itertools.product(TOKENS.items(), at("sequences")):
        counts = {}
        for head in ("ctc", "transducer"):
            with torch.device("meta"):
                network = create(name, tokens, mechanism=mechanism, head=head)
            counts[head] = sum(parameter.numel() for parameter in network.parameters())
        published = _printed(7, name, mechanism).get(SIZE)
        yield {"name": name, "mechanism": mechanism, "tokens": tokens, **counts, "published": published}


def generators() -> Iterator[Row]:
    """Variants of DiT-S/2 with each mechanism, and the cost of one pass."""
    for (variant, arguments), mechanism in itertools.product(VARIANTS.items(), at("images")):
        with torch.device("meta"):
            network = create("dit_small_patch2", 1000, mechanism=mechanism, learn_sigma=True, **arguments)
        number, dit = torch.zeros(1, dtype=torch.long), cast(DiT, network)
        images = torch.zeros(1, dit.channels, dit.input_size, dit.input_size)
        cost = asdict(count_batch(network, images, number, number))
        published = _printed(8, variant, mechanism).get(FLOPS)
        yield {"variant": variant, "mechanism": mechanism, **cost, "published_macs": published}


def _printed(table: int, name: str, mechanism: str) -> Mapping[str, Any]:
    row = PRINTED.get(name, {}).get(mechanism)
    return ROWS[f"MALA, Table {table}, {row}"].values if row else {}


OF_CLASSIFIERS = (
    "MACs per image at the given size: convolutions and linear layers, + attention products. Weights: the tag of"
    " those that timm.create_model(MODEL.TAG, pretrained=True) loads, cifar10 from linvit itself, in1k from the hub"
)
OF_DENSE = (
    "MACs of convolutions and linear layers (the papers' FLOPs also count norms, up to 0.5 %), + attention products"
)
OF_DECODERS = f"memory: cache of one sequence after {CONTEXT:,} tokens, float32; for softmax it grows with the tokens"
OF_CONFORMERS = (
    "CTC: encoder and one projection to the tokens. Transducer: with predictor and joint network of 320 channels, as"
    " published (millions of parameters)."
)
OF_GENERATORS = (
    "MACs of one pass for one 4×32×32 latent. MALA's Table 8 prints"
    f" {ROWS['MALA, Table 8, MALA'].with_unit(FLOPS)} for its network, which is not released; we do not know whether"
    " one of these rows is that network."
)
OF_STUDENTS = (
    "The network is `linearized`, made from any softmax network that the page Linearize your network names; `linvit"
    " models` lists those of linvit."
)
OF_OTHER_SHAPE = " With the model of a teacher as `task.teacher_model` it is any network for classification."
LISTINGS: dict[str, tuple[str, Callable[[], Iterator[Row]]]] = {
    "classification": (OF_CLASSIFIERS, classifiers),
    "multilabel": (OF_CLASSIFIERS, classifiers),
    "detection": (OF_DENSE, partial(dense, DETECTORS)),
    "segmentation": (OF_DENSE, partial(dense, SEGMENTORS)),
    "language": (OF_DECODERS, decoders),
    "recall": (OF_DECODERS, decoders),
    "diffusion": (OF_GENERATORS, generators),
    "speech": (OF_CONFORMERS, conformers),
    "alignment": (OF_STUDENTS, lambda: iter(())),
    "transfer": (OF_STUDENTS + OF_OTHER_SHAPE, lambda: iter(())),
}
"""Of each task the words below its table, and its rows."""


def store_networks() -> None:
    """Counts the networks of every task and stores them as `linvit.bundled` reads them."""
    listed = {task: {"caption": words, "rows": list(tracked(rows(), task))} for task, (words, rows) in LISTINGS.items()}
    write_json(NETWORKS, listed, indent=1)

"""Jobs on whole networks: peers at their best, and training."""

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from evidence.gpu.jobs import Case, Results

# All that the queue uses of linvit.bench; the other files import it from here.
from linvit.bench import gpu
from linvit.bench.clock import Call, CudaClock, HostClock, Timing, interleave
from linvit.bench.exactness import Deviation, plain_softmax, relative_error
from linvit.bench.kinds import measure
from linvit.bench.machine import describe
from linvit.bench.networks import Case as Network
from linvit.bench.networks import build_call
from linvit.bench.rows import Row, crossover
from linvit.models.by_name import is_ours

__all__ = [
    "Deviation",
    "Network",
    "Row",
    "build_call",
    "crossover",
    "describe",
    "gpu",
    "measure",
    "plain_softmax",
    "relative_error",
]

CODE = tuple(f"linvit/{room}" for room in ("models", "layers", "ops", "kernels", "fusion"))
OURS = ("ravlt_tiny", "mavit_tiny", "care_s0")
BASE = "deit_small_patch16_224"
PEERS = (BASE, "convnext_tiny", "swin_tiny_patch4_window7_224", "efficientvit_b1", "mobilenetv4_conv_medium")
LARGE = ("ravlt_tiny_linear", "mavit_tiny_linear", "care_s0", *PEERS[:3])
FUSED = "fused+channels_last+bf16"
INFERENCE = {"eager": ("fused+bf16", FUSED), "compiled": (f"{FUSED}+autotuned",)}
TRAINED = ("ravlt_tiny", "ravlt_small_linear", "care_s0", BASE, "convnext_tiny", "convnext_small")
BEST = "channels_last+bf16+fused_adamw"
STEPS = {"eager": ("bf16", BEST), "compiled": (f"{BEST}+compiled", f"{BEST}+graphed")}
SIZES = (
    *(f"{family}_{size}" for size in ("tiny", "small", "base", "large") for family in ("ravlt", "mavit")),
    *(f"care_s{size}" for size in range(3)),
)
"""All networks of the papers."""
BATCHES, PIXELS = (64, 1, 256), (512, 1024, 2048)
IMAGENET = 1_281_167  # training images
RECIPES = {"ravlt_tiny": "ravlt/tiny_imagenet_300e", "care_s0": "care/s0_imagenet_300e"}
TRAINED_AS: dict[str, dict[str, Any]] = {
    "as the recipe": {},
    "bfloat16": {"trainer.precision": "bf16-mixed"},
    "bfloat16, compiled": {"trainer.precision": "bf16-mixed", "task.compile": True, "optimizer.options.fused": True},
}
DEVICE = {False: "cuda", True: "cpu"}  # by toy
TOYS = {BASE: "test_vit", "ravlt_tiny": "ravlt_nano", "convnext_tiny": "test_convnext"}


def medians(calls: Mapping[str, Call], toy: bool, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of each call, in turn; on a GPU they are captured in graphs."""
    timings: dict[str, Timing] = {}
    clock = HostClock("wall", time.perf_counter) if toy else CudaClock()
    interleave(calls, clock, 1 if toy else rounds, timings)
    return {name: timing.median_ms for name, timing in timings.items()}


def peers(toy: bool) -> list[Case]:
    wanted = [(name, 224, batch) for batch in (64, 1) for name in (*OURS, *PEERS)]
    listed = [case for each in wanted[: 1 if toy else None] for case in cases(networks, INFERENCE, *each, toy)]
    return [*listed, Case("one layer by inductor", one_layer, ("timm",))] if toy else listed


def large_peers(toy: bool) -> list[Case]:
    wanted = [(name, 1024, 16) for name in LARGE] + [(name, 224, 256) for name in (*OURS, *PEERS)]
    return [case for each in (wanted[3:4] if toy else wanted) for case in cases(networks, INFERENCE, *each, toy)]


def training(toy: bool) -> list[Case]:
    names, recipes, ways = (tuple(x)[: 1 if toy else None] for x in (TRAINED, RECIPES, TRAINED_AS))
    listed = [case for name in names for case in cases(steps, STEPS, name, 224, 64, toy)]
    for name, words in itertools.product(recipes, ways):
        function = partial(end_to_end, name, words, toy)
        listed.append(Case(f"linvit train {name}, {words}", function, (*CODE, "linvit/runs", "linvit/data")))
    return listed


def all_sizes(toy: bool) -> list[Case]:
    """Inference and training of every size, and images that grow, from what is asked for most to the least."""
    most = 1 if toy else None
    listed = [
        case
        for batch, name in itertools.product(BATCHES[:most], SIZES[:most])
        for case in cases(networks, {"compiled": (f"{FUSED}+compiled",)}, name, 224, batch, toy)
    ]
    for name in SIZES[:most]:
        trained = cases(hours, {"compiled": (f"{BEST}+compiled",)}, name, 224, 64, toy)
        listed += [replace(case, name=f"training {case.name}") for case in trained]
    for pixels, name in itertools.product(PIXELS[:most], ("ravlt_tiny", "ravlt_tiny_linear", "care_s0")[:most]):
        listed += cases(networks, {"eager": (FUSED,)}, name, pixels, 1, toy)
    return listed


def hours(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Steps of training, with the hours that 300 epochs of ImageNet would take on this card if the images arrive."""
    table = steps(name, pixels, batch, variants, toy)["cells"]
    for cells in table:
        cells["300 epochs of ImageNet, h"] = cells["images/s"] and 300 * IMAGENET / cells["images/s"] / 3600
    return {"cells": table}


def cases(function: Any, kinds: dict[str, Any], name: str, pixels: int, batch: int, toy: bool) -> list[Case]:
    """A case for each kind of variants of a network, ours with the kernels; the compiled ones take long to generate."""
    code, kernels = (CODE, "+triton") if is_ours(name) else (("timm",), "")
    listed = []
    for kind, variants in kinds.items():
        chosen = tuple(f"{variant}{'' if toy else kernels}" for variant in variants)
        call = partial(function, name, pixels, batch, chosen, toy)
        generate = call if kind == "compiled" else None
        listed.append(Case(f"{name}, {kind}, {pixels} px, {batch} images", call, code, generate))
    return listed


def networks(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Variants of a network beside DeiT-S in bfloat16, in the same rounds, each after its check."""
    torch.compiler.reset()
    pixels, batch = (32, 2) if toy else (pixels, batch)
    options = _common(toy) | {"sizes": ((pixels, pixels),), "batches": (batch,), "peer_variants": ("bf16",)}
    options |= {"names": (_toy(name, toy),), "peers": (_toy(BASE, toy),)}
    return beside_base(measure("model", variants=variants, **options).rows)


def steps(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Steps of training of a network, and right after it of DeiT-S."""
    torch.compiler.reset()
    options = _common(toy) | {"size": (64, 64) if toy else (pixels, pixels), "batch": 8 if toy else batch}
    rows = measure("train", names=(_toy(name, toy),), variants=variants, **options).rows
    return beside_base(rows + measure("train", names=(_toy(BASE, toy),), variants=("bf16",), **options).rows)


def _common(toy: bool) -> dict[str, Any]:
    return {"device": DEVICE[toy], "memory": not toy, "rounds": 1 if toy else 7, "seconds": 6.0}


def beside_base(rows: list[Any]) -> Results:
    """A row of the table for each row of a report but the last, which is DeiT-S; × is the ratio to it."""
    *rows, base = rows
    table = []
    for row in rows:
        ms, variant = row.median_ms, row.variant if row.skipped is None else f"{row.variant}: {row.skipped}"
        cells = {"network": row.name, "pattern": row.pattern or "–", "variant": variant, "px": row.size[0]}
        cells |= {"images": row.batch, "ms": ms, "± IQR": row.spread_ms, "images/s": ms and 1000 * row.batch / ms}
        cells |= {"DeiT-S, ms": base.median_ms, "×": ms and base.median_ms and base.median_ms / ms}
        table.append(cells | {"peak MiB": row.peak_mib, "error": row.error})
    return {"cells": table}


def end_to_end(name: str, words: str, toy: bool) -> Results:
    """Images per second of `linvit train` with its recipe and changes, from JPEG files, beside those of a step alone.

    The warm-up is longer than what the loader has ready when the first step, which may compile, is done.
    """
    from evidence.gpu.linearize_costs import Clock
    from linvit.runs.training import train_folder

    warm_up, timed, batch = (1, 2, 8) if toy else (3 * (os.cpu_count() or 1), 50, 128)
    clock = Clock(warm_up)
    with TemporaryDirectory() as folder:
        _write_images(Path(folder), (warm_up + timed) * max(batch, 32))
        given: dict[str, Any] = {"folder": f"{folder}/run", "data.root": folder, "data.batch_size": batch}
        given |= {"data.num_workers": 0 if toy else os.cpu_count(), "distillation.teacher": None}
        limits: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": warm_up + timed, "limit_val_batches": 1}
        limits |= {"accelerator": "cpu" if toy else "gpu", "sync_batchnorm": False}
        given |= {f"trainer.{key}": value for key, value in limits.items()} | TRAINED_AS[words]
        if toy:
            given |= {"model.name": _toy(name, toy), "model.drop_path_rate": 0.0, "data.size": 32}
        train_folder(f"recipes/{RECIPES[name]}.yaml", given, callbacks=[clock])
    reached = timed * batch / (clock.times[1] - clock.times[0])
    variant = f"{BEST}{'+compiled' * ('compiled' in words)}{'' if toy else '+triton'}"
    (alone,) = steps(name, 224, batch, (variant,), toy)["cells"]
    cells = {"linvit train": name, "changes": words, "step alone": variant, "images": batch, "images/s": reached}
    return {"cells": [cells | {"of a step alone": f"{100 * reached / alone['images/s']:.0f} %"}]}


def one_layer() -> Results:
    """That inductor works, on one layer; the other toys are compiled without it, which would take minutes."""
    layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    got = torch.compile(layer, backend="inductor", mode="max-autotune-no-cudagraphs")(x)
    return {"cells": [{"layer": "Linear", "error": float((got - layer(x)).detach().abs().max())}]}


def _toy(name: str, toy: bool) -> str:
    return TOYS.get(name, TOYS["ravlt_tiny" if is_ours(name) else "convnext_tiny"]) if toy else name


def _write_images(folder: Path, number: int) -> None:
    """One noisy JPEG file, as large in pixels and bytes as ImageNet's are, under many names, in two classes."""
    from PIL import Image

    Image.effect_noise((500, 375), 40).convert("RGB").save(folder / "image.jpeg", quality=75)
    for split, count in (("train", number), ("val", 4)):
        for index in range(count):
            path = folder / split / f"class {index % 2}" / f"{index}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(folder / "image.jpeg")

"""Jobs on whole networks: peers at their best, and training. All that the queue uses of `linvit bench` is used here."""

import itertools
import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from linvit.bench.clock import Call, CudaClock, HostClock, Timing, interleave
from linvit.bench.kinds import measure
from linvit.bench.networks import Case as Network
from linvit.bench.networks import build_call
from linvit.models.by_name import is_ours
from tools.gpu.jobs import Case, Results

CODE = tuple(f"linvit/{room}" for room in ("models", "layers", "ops", "kernels", "fusion"))
OURS = ("ravlt_tiny", "mavit_tiny", "care_s0")
BASE = "deit_small_patch16_224"
PEERS = (BASE, "convnext_tiny", "swin_tiny_patch4_window7_224", "efficientvit_b1", "mobilenetv4_conv_medium")
LARGE = ("ravlt_tiny_linear", "mavit_tiny_linear", "care_s0", *PEERS[:3])
INFERENCE = {
    "eager": ("fused+bf16", "fused+channels_last+bf16"),
    "compiled": ("fused+channels_last+bf16+autotuned",),
}
TRAINED = ("ravlt_tiny", "ravlt_small_linear", "care_s0", BASE, "convnext_tiny", "convnext_small")
BEST = "channels_last+bf16+fused_adamw"
STEPS = {"eager": ("bf16", BEST), "compiled": (f"{BEST}+compiled", f"{BEST}+graphed")}
RECIPES = {"ravlt_tiny": "ravlt/tiny_imagenet_300e", "care_s0": "care/s0_imagenet_300e"}
TRAINED_AS: dict[str, dict[str, Any]] = {
    "as the recipe": {},
    "bfloat16": {"trainer.precision": "bf16-mixed"},
    "bfloat16, compiled": {"trainer.precision": "bf16-mixed", "task.compile": True, "optimizer.options.fused": True},
}
TOYS = {BASE: "test_vit", "ravlt_tiny": "ravlt_nano", "convnext_tiny": "test_convnext"}


def medians(calls: dict[str, Call], toy: bool, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of each call, in turn; on a GPU they are captured in graphs."""
    timings: dict[str, Timing] = {}
    clock = HostClock("wall", time.perf_counter) if toy else CudaClock()
    interleave(calls, clock, 1 if toy else rounds, timings)
    return {name: timing.median_ms for name, timing in timings.items()}


def call_of(name: str, variant: str, batch: int, toy: bool) -> Call:
    """A call of a network with random weights on random images."""
    size, batch = ((32, 32), 2) if toy else ((224, 224), batch)
    return build_call(Network(_toy(name, toy), variant, size, batch, device(toy)))


def device(toy: bool) -> str:
    return "cpu" if toy else "cuda"


def peers(toy: bool) -> list[Case]:
    wanted = [(name, 224, batch) for batch in (64, 1) for name in (*OURS, *PEERS)]
    found = [case for each in wanted[: 1 if toy else None] for case in cases(networks, INFERENCE, *each, toy)]
    return [*found, Case("one layer by inductor", one_layer, ("timm",))] if toy else found


def large_peers(toy: bool) -> list[Case]:
    wanted = [(name, 1024, 16) for name in LARGE] + [(name, 224, 256) for name in (*OURS, *PEERS)]
    return [case for each in (wanted[3:4] if toy else wanted) for case in cases(networks, INFERENCE, *each, toy)]


def training(toy: bool) -> list[Case]:
    names, recipes, ways = TRAINED, tuple(RECIPES), tuple(TRAINED_AS)
    if toy:
        names, recipes, ways = names[:1], recipes[:1], ways[:1]
    found = [case for name in names for case in cases(steps, STEPS, name, 224, 64, toy)]
    for name, words in itertools.product(recipes, ways):
        function = partial(end_to_end, name, words, toy)
        found.append(Case(f"linvit train {name}, {words}", function, (*CODE, "linvit/runs", "linvit/data")))
    return found


def cases(
    function: Any, kinds: dict[str, tuple[str, ...]], name: str, pixels: int, batch: int, toy: bool
) -> list[Case]:
    """A case for each kind of variants of a network, ours with the kernels; the compiled ones take long to generate."""
    code, kernels = (CODE, "+triton") if is_ours(name) else (("timm",), "")
    found = []
    for kind, variants in kinds.items():
        own = tuple(f"{variant}{'' if toy else kernels}" for variant in variants)
        call = partial(function, name, pixels, batch, own, toy)
        words = f"{name}, {kind}, {pixels} px, {batch} images"
        found.append(Case(words, call, code, call if kind == "compiled" else None))
    return found


def networks(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Variants of a network beside DeiT-S in bfloat16, in the same rounds, each after its check."""
    torch.compiler.reset()
    pixels, batch = (32, 2) if toy else (pixels, batch)
    options: dict[str, Any] = {"sizes": ((pixels, pixels),), "batches": (batch,), "rounds": 1 if toy else 7}
    options |= {"device": device(toy), "memory": not toy, "seconds": 6.0}
    options |= {"peers": (_toy(BASE, toy),), "peer_variants": ("bf16",)}
    return cells(measure("model", names=(_toy(name, toy),), variants=variants, **options).rows)


def steps(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Steps of training of a network, and right after it of DeiT-S."""
    torch.compiler.reset()
    pixels, batch = (64, 8) if toy else (pixels, batch)
    options: dict[str, Any] = {"size": (pixels, pixels), "batch": batch, "rounds": 1 if toy else 5}
    options |= {"device": device(toy), "memory": not toy, "seconds": 8.0}
    rows = measure("train", names=(_toy(name, toy),), variants=variants, **options).rows
    return cells(rows + measure("train", names=(_toy(BASE, toy),), variants=("bf16",), **options).rows)


def cells(rows: list[Any]) -> Results:
    """A row of the table for each row of a report; the last of them is DeiT-S, to which × is the ratio."""
    base, table = rows[-1].median_ms, []
    for row in rows:
        ms, variant = row.median_ms, row.variant if row.skipped is None else f"{row.variant}: {row.skipped}"
        found = {"network": row.name, "pattern": row.pattern, "variant": variant, "px": row.size[0]}
        found |= {"images": row.batch, "ms": ms, "± IQR": row.spread_ms, "images/s": ms and 1000 * row.batch / ms}
        found |= {"× DeiT-S": base / ms if base and ms else None, "peak MiB": row.peak_mib, "error": row.error}
        table.append(found)
    return {"cells": table}


def end_to_end(name: str, words: str, toy: bool) -> Results:
    """Images per second of `linvit train` with its recipe and changes, from JPEG files, after a warm-up."""
    from lightning.pytorch import Callback

    from linvit.runs.training import train_folder

    times: list[float] = []
    warm_up, timed, batch = (1, 2, 8) if toy else (10, 40, 128)

    class Clock(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, images: Any, batch_idx: int) -> None:
            if batch_idx + 1 in (warm_up, warm_up + timed):
                if not toy:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

    with TemporaryDirectory() as folder:
        _write_images(Path(folder), 80 if toy else 12800)
        given: dict[str, Any] = {"folder": f"{folder}/run", "data.root": folder, "data.batch_size": batch}
        given |= {"data.num_workers": 0 if toy else os.cpu_count(), "distillation.teacher": None}
        limits = {"max_epochs": 1, "limit_train_batches": warm_up + timed, "limit_val_batches": 1}
        limits |= {"accelerator": "cpu" if toy else "gpu", "sync_batchnorm": False}
        given |= {f"trainer.{key}": value for key, value in limits.items()} | TRAINED_AS[words]
        if toy:
            given |= {"model.name": _toy(name, toy), "model.drop_path_rate": 0.0, "data.size": 32}
        train_folder(f"recipes/{RECIPES[name]}.yaml", given, callbacks=[Clock()])
    reached = timed * batch / (times[1] - times[0])
    variant = f"{BEST}{'+compiled' * ('compiled' in words)}{'' if toy else '+triton'}"
    alone = steps(name, 224, batch, (variant,), toy)["cells"][0]
    found = {"linvit train": name, "changes": words, "images": batch, "images/s": reached}
    return {"cells": [found | {"of a step alone": f"{100 * reached / alone['images/s']:.0f} %"}], "alone": alone}


def one_layer() -> Results:
    """That inductor works, on one layer; the other toys are compiled without it, which would take minutes."""
    layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    got = torch.compile(layer, backend="inductor", mode="max-autotune-no-cudagraphs")(x)
    return {"cells": [{"layer": "Linear", "error": float((got - layer(x)).detach().abs().max())}]}


def _toy(name: str, toy: bool) -> str:
    return TOYS.get(name, TOYS["ravlt_tiny" if is_ours(name) else "convnext_tiny"]) if toy else name


def _write_images(folder: Path, number: int) -> None:
    """Copies of one noisy JPEG file, as large in pixels and bytes as ImageNet's are, in two classes."""
    from PIL import Image

    for part, count in (("train", number), ("val", 4)):
        for index in range(count):
            path = folder / part / ("n01440764", "n01443537")[index % 2] / f"{index}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if index < 2:
                Image.effect_noise((500, 375), 40).convert("RGB").save(path, quality=75)
            else:
                path.hardlink_to(path.with_name(f"{index % 2}.jpeg"))

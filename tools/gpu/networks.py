"""Jobs on whole networks: peers at their best, and training. All that the queue uses of `linvit bench` is used here."""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
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
LARGE = ("ravlt_tiny_linear", "mavit_tiny_linear", "care_s0", BASE, "convnext_tiny", "swin_tiny_patch4_window7_224")
EAGER = ("fused+bf16", "fused+channels_last+bf16")
COMPILED = ("fused+channels_last+bf16+autotuned",)
TRAINED = ("ravlt_tiny", "ravlt_small_linear", "care_s0", BASE, "convnext_tiny", "convnext_small")
STEPS = ("bf16", "channels_last+bf16+fused_adamw")
COMPILED_STEPS = ("channels_last+bf16+fused_adamw+compiled", "channels_last+bf16+fused_adamw+graphed")
RECIPES = {"ravlt_tiny": "ravlt/tiny", "care_s0": "care/s0"}
TRAINED_AS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "bfloat16": {"trainer.precision": "bf16-mixed"},
    "bfloat16 compiled": {"trainer.precision": "bf16-mixed", "task.compile": True, "optimizer.options.fused": True},
}
TOYS = {BASE: "test_vit", "ravlt_tiny": "ravlt_nano", "convnext_tiny": "test_convnext"}
TOY_PIXELS, TOY_BATCH = 32, 2
WARM_UP, TIMED = 10, 40  # steps of `linvit train`


def medians(calls: dict[str, Call], toy: bool, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of each call, in turn; on a GPU they are captured in graphs."""
    timings: dict[str, Timing] = {}
    interleave(calls, HostClock("wall", time.perf_counter) if toy else CudaClock(), 1 if toy else rounds, timings)
    return {name: timing.median_ms for name, timing in timings.items()}


def call_of(name: str, variant: str, batch: int, toy: bool) -> Call:
    """A call of a network with random weights on random images."""
    size = (TOY_PIXELS, TOY_PIXELS) if toy else (224, 224)
    return build_call(Network(_toy(name, toy), variant, size, TOY_BATCH if toy else batch, "cpu" if toy else "cuda"))


def peers(toy: bool) -> list[Case]:
    wanted = [(name, 224, batch) for batch in (64, 1) for name in (*OURS, *PEERS)]
    found = [
        case for name, pixels, batch in wanted[: 1 if toy else None] for case in _network(name, pixels, batch, toy)
    ]
    return [*found, Case("one layer by inductor", _one_layer, ("timm",))] if toy else found


def large_peers(toy: bool) -> list[Case]:
    wanted = [(name, 1024, 16) for name in LARGE] + [(name, 224, 256) for name in (*OURS, *PEERS)]
    return [
        case for name, pixels, batch in (wanted[3:4] if toy else wanted) for case in _network(name, pixels, batch, toy)
    ]


def training(toy: bool) -> list[Case]:
    cases = []
    for name in TRAINED[: 1 if toy else None]:
        for variants in (STEPS, COMPILED_STEPS):
            kind = "compiled" if variants is COMPILED_STEPS else "eager"
            function = partial(steps, name, 64, _own(name, variants, toy), toy)
            generate = function if variants is COMPILED_STEPS else None
            cases.append(Case(f"{name}, {kind}, 64 images", function, _code(name), generate))
    for name in list(RECIPES)[: 1 if toy else None]:
        for words, changes in list(TRAINED_AS.items())[: 1 if toy else None]:
            function = partial(end_to_end, name, changes, toy)
            cases.append(Case(f"linvit train {name}, {words}", function, (*CODE, "linvit/runs", "linvit/data")))
    return cases


def networks(name: str, pixels: int, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Variants of a network beside DeiT-S in bfloat16, in the same rounds, each after its check."""
    torch.compiler.reset()
    if toy:
        pixels, batch = TOY_PIXELS, TOY_BATCH
    options: dict[str, Any] = {"sizes": ((pixels, pixels),), "batches": (batch,), "rounds": 1 if toy else 7}
    options |= {"device": "cpu" if toy else "cuda", "memory": not toy, "seconds": 6.0}
    peer = {"peers": (_toy(BASE, toy),), "peer_variants": ("bf16",)}
    return cells(measure("model", names=(_toy(name, toy),), variants=variants, **peer, **options).rows, pixels)


def steps(name: str, batch: int, variants: tuple[str, ...], toy: bool) -> Results:
    """Steps of training of a network, and right after it of DeiT-S."""
    torch.compiler.reset()
    options: dict[str, Any] = {"batch": 8 if toy else batch, "size": (64, 64) if toy else (224, 224)}
    options |= {"device": "cpu" if toy else "cuda", "memory": not toy, "rounds": 1 if toy else 5, "seconds": 8.0}
    rows = measure("train", names=(_toy(name, toy),), variants=variants, **options).rows
    return cells(rows + measure("train", names=(_toy(BASE, toy),), variants=STEPS[:1], **options).rows, 224)


def cells(rows: list[Any], pixels: int) -> Results:
    """A row of the table for each row of a report; the last of them is DeiT-S, to which × is the ratio."""
    base = rows[-1].median_ms
    table = []
    for row in rows:
        ms = row.median_ms
        found = {"network": row.name, "pattern": row.pattern, "variant": row.variant, "px": pixels, "images": row.batch}
        found |= {"ms": ms, "± IQR": row.spread_ms, "images/s": ms and 1000 * row.batch / ms}
        found |= {"× DeiT-S": base / ms if base and ms else None, "peak MiB": row.peak_mib, "error": row.error}
        table.append(found if row.skipped is None else found | {"variant": f"{row.variant}: {row.skipped}"})
    return {"cells": table}


def end_to_end(name: str, changes: dict[str, Any], toy: bool) -> Results:
    """Images per second of `linvit train` with its recipe and these changes, from JPEG files, after a warm-up."""
    from lightning.pytorch import Callback

    from linvit.runs.training import train_folder

    times: list[float] = []

    class Clock(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 in (warm_up, warm_up + timed):
                if not toy:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

    warm_up, timed, batch = (1, 2, 8) if toy else (WARM_UP, TIMED, 128)
    with tempfile.TemporaryDirectory() as folder:
        _write_images(Path(folder), 80 if toy else 12800)
        given: dict[str, Any] = {
            "folder": f"{folder}/run",
            "data.root": folder,
            "data.batch_size": batch,
            "data.num_workers": 0 if toy else os.cpu_count(),
            "distillation.teacher": None,
            "trainer.max_epochs": 1,
            "trainer.limit_train_batches": warm_up + timed,
            "trainer.limit_val_batches": 1,
            "trainer.accelerator": "cpu" if toy else "gpu",
            "trainer.sync_batchnorm": False,
            **changes,
        }
        if toy:
            given |= {"model.name": TOYS["ravlt_tiny"], "model.drop_path_rate": 0.0, "data.size": 32}
        train_folder(f"recipes/{RECIPES[name]}_imagenet_300e.yaml", given, callbacks=[Clock()])
    reached = timed * batch / (times[1] - times[0])
    variant = _own(name, COMPILED_STEPS if changes.get("task.compile") else STEPS[-1:], toy)[:1]
    alone = steps(name, batch, variant, toy)["cells"][0]
    words = ", ".join(f"{key}={value}" for key, value in changes.items()) or "as the recipe"
    found = {"linvit train": name, "changes": words, "images": batch, "images/s": reached}
    return {"cells": [found | {f"step alone, {alone['variant']}": alone["images/s"]}]}


def _network(name: str, pixels: int, batch: int, toy: bool) -> list[Case]:
    cases = []
    for kind, variants in (("eager", EAGER), ("compiled", COMPILED)):
        function = partial(networks, name, pixels, batch, _own(name, variants, toy), toy)
        generate = function if variants is COMPILED else None
        cases.append(Case(f"{name}, {kind}, {pixels} px, {batch} images", function, _code(name), generate))
    return cases


def _own(name: str, variants: tuple[str, ...], toy: bool) -> tuple[str, ...]:
    """The variants, with the kernels if the network is ours."""
    return tuple(f"{variant}+triton" for variant in variants) if is_ours(name) and not toy else variants


def _code(name: str) -> tuple[str, ...]:
    return CODE if is_ours(name) else ("timm",)


def _toy(name: str, toy: bool) -> str:
    return TOYS.get(name, TOYS["ravlt_tiny"] if is_ours(name) else TOYS["convnext_tiny"]) if toy else name


def _one_layer() -> Results:
    """That inductor works, on one layer; the other toys are compiled without it, which would take minutes."""
    layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    got = torch.compile(layer, backend="inductor", mode="max-autotune-no-cudagraphs")(x)
    return {"cells": [{"layer": "Linear", "error": float((got - layer(x)).detach().abs().max())}]}


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

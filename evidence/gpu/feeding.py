"""The job on what feeds and fills a GPU in training: images augmented there or on the CPU, activations kept or not."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch.utils.data import default_collate

from evidence.gpu import networks
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import CODE, DEVICE, RECIPES
from linvit.data.images.augmentation_steps import Draws
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.on_device import augmented

PLACES = ("cpu", "device")
NETWORKS = ("ravlt_small_linear", "ravlt_tiny", "care_s0")
KEPT = tuple(f"channels_last+bf16{change}" for change in ("", "+recomputing", "+checkpointing"))
BATCHES = (128, 1024)
LOADING = "linvit/data"


def cases(toy: bool) -> list[Case]:
    names, kept = (NETWORKS[:1], KEPT[:2]) if toy else (NETWORKS, tuple(f"{variant}+triton" for variant in KEPT))
    listed = [Case(f"a batch of {number} augmented", partial(batch, number, toy), (LOADING,)) for number in BATCHES]
    listed += [Case(f"{name}, memory", partial(networks.steps, name, 224, 64, kept, toy), CODE) for name in names]
    for name, place in itertools.product(tuple(RECIPES)[: 1 if toy else None], PLACES):
        words = f"bfloat16, images augmented on the {place}"
        listed.append(
            Case(f"linvit train {name}, {words}", partial(trained, name, words, place, toy), (*CODE, LOADING))
        )
    return listed


def trained(name: str, words: str, place: str, toy: bool) -> Results:
    """Images per second of `linvit train` from JPEG files."""
    changes = {"trainer.precision": "bf16-mixed", "task.channels_last": True, "data.augment_on": place}
    with patch.dict(networks.TRAINED_AS, {words: changes}):
        return networks.end_to_end(name, words, toy)


class Alone(AugmentedSource):
    """The papers' augmentation, without data."""

    def images(self, *_: Any) -> Any:
        raise NotImplementedError


def batch(number: int, toy: bool) -> Results:
    """Milliseconds and memory of augmenting a batch, which has been cropped, on the device."""
    source = Alone(size=32 if toy else 224, augment_on="device")
    draws, image = source.train_transform(), Image.effect_noise((500, 375), 40).convert("RGB")
    assert isinstance(draws, Draws)
    drawn = default_collate([draws(image) for _ in range(2 if toy else number)])
    drawn = type(drawn)(*(x.to(DEVICE[toy]) for x in drawn))
    pre = source.preprocessing
    times = [_seconds(partial(augmented, drawn, pre.size, pre.mean, pre.std), toy) for _ in range(1 if toy else 9)]
    cells: dict[str, Any] = {"augmented images": len(drawn.pixels), "ms": 1000 * median(times)}
    if not toy:
        torch.cuda.reset_peak_memory_stats()
        augmented(drawn, pre.size, pre.mean, pre.std)
        cells["peak MiB"] = torch.cuda.max_memory_allocated() / 2**20
    return {"cells": [cells]}


def _seconds(call: Callable[[], object], toy: bool) -> float:
    """With what starting the operators takes; the seed of the noise is read on the CPU, so graphs cannot capture it."""
    calls = 1 if toy else 10
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if not toy:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls

"""Images per second and peak memory of aligning and transferring on a GPU, with one random batch that stays there.

python -m evidence.gpu.linearize_costs [--recipes RECIPE ...] [--batch N] [--size N] [--steps N] [KEY=VALUE ...]
"""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from lightning import Callback, Trainer
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from linvit.analysis.markdown import markdown_table
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe

WARM_UP = 4
RECIPES = [Path("recipes/linearize") / f"dinov2_base_{step}.yaml" for step in ("align", "transfer")]


class Clock(Callback):
    """The times after the warm-up and after the last step."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (self.warm_up - 1, trainer.num_training_batches - 1):
            _synchronize()
            self.times.append(time.perf_counter())


def measure(recipe: Path, options: argparse.Namespace, images: str) -> list[str]:
    """A row: recipe, images per second, peak memory, and both of the teacher's inference."""
    given = {"task.teacher": "null", "init": "null", "data.root": images, "data.num_workers": 0}
    given |= {"data.batch_size": options.batch, "data.size": options.size, "trainer.accelerator": "gpu"}
    values = read_recipe(recipe, [f"{key}={value}" for key, value in given.items()] + options.overrides)
    task, source = Recipe(values).build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = options.batch, 3, options.size, options.size
    batch = torch.randn(size, device=device), torch.zeros(options.batch, dtype=torch.long, device=device)
    batches: Any = [batch] * (WARM_UP + options.steps)
    cast(Any, source).train_dataloader = lambda: DataLoader(batches, batch_size=None)
    clock, once = Clock(WARM_UP), {"max_epochs": 1, "limit_val_batches": 0, "logger": False}
    once |= {"enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**{**values["trainer"], **once, "callbacks": [clock]})
    trainer.fit(task, datamodule=source)
    trained = options.batch * options.steps / (clock.times[1] - clock.times[0]), _peak()
    teacher = cast(nn.Module, task.original).to(device).eval()
    mixed = torch.autocast(device.type, torch.bfloat16) if "bf16" in values["trainer"]["precision"] else nullcontext()
    with torch.inference_mode(), mixed:
        teacher(batch[0])
        _synchronize()
        began = time.perf_counter()
        for _ in range(options.steps):
            teacher(batch[0])
        _synchronize()
    inferred = options.batch * options.steps / (time.perf_counter() - began), _peak()
    return [recipe.stem, *(f"{value:.4g}" for value in (*trained, *inferred))]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> float:
    """GiB since the last call; 0 without a GPU."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", type=Path, nargs="+", default=RECIPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, such as trainer.accelerator=cpu")
    options = parser.parse_intermixed_args()
    columns = ["recipe", "images/s", "peak GiB", "teacher's images/s", "teacher's peak GiB"]
    with TemporaryDirectory() as images:
        for split in ("train", "val"):
            (Path(images) / split).mkdir()
            Image.new("RGB", (options.size, options.size)).save(Path(images) / split / "image.png")
        rows = [measure(recipe, options, images) for recipe in options.recipes]
    print(markdown_table(columns, rows, left=1))


if __name__ == "__main__":
    main()

"""A recipe of a DiT that trains in seconds on the real digits."""

from pathlib import Path

from tiny_run import write_merged

SIZES = {"width": 16, "depth": 2, "heads": 2}


def write_diffusion_recipe(folder: Path, mechanism: str = "mala", **groups) -> Path:
    """Three epochs of four batches, as folder/tiny.yaml; the run goes to folder/run."""
    values = {
        "folder": str(folder / "run"),
        "seed": 1,
        "model": {"name": "dit_nano_patch2", "mechanism": mechanism, **SIZES},
        "task": {"name": "diffusion", "ema_decay": 0.5, "steps": 4},
        "optimizer": {"lr": 1e-2},
        "data": {"name": "digit_images", "batch_size": 16, "held_out": 0.02},
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "limit_train_batches": 4},
    }
    return write_merged(folder / "tiny.yaml", values, groups)

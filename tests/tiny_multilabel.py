"""A recipe on a handful of scenes with labels, which trains in seconds."""

from pathlib import Path

from tiny_run import write_merged


def write_multilabel_recipe(folder: Path, root: Path, **groups) -> Path:
    """Two epochs on the images of root, with groups merged over them; the run goes to folder/run."""
    values = {
        "seed": 3,
        "folder": str(folder / "run"),
        "model": {"name": "ravlt_nano"},
        "task": {"name": "multilabel", "asymmetric": True, "ema_decay": 0.9},
        "data": {"name": "labelled", "root": str(root), "size": 64, "batch_size": 2, "num_workers": 0},
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
    }
    return write_merged(folder / "multilabel.yaml", values, groups)

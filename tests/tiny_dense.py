"""Recipes on a handful of scenes, whose networks are narrow enough to train in seconds."""

from pathlib import Path

from tiny_run import write_merged

from linvit.data.dense.scenes import make_scenes

SIZE = 64
HEADS = {
    "retinanet": {"width": 16},
    "mask_rcnn": {"width": 16, "hidden": 32, "num_regions": 16},
    "cascade_mask_rcnn": {"width": 16, "hidden": 32, "num_regions": 16},
    "semantic_fpn": {"width": 16},
    "upernet": {"width": 16},
}
SEGMENTORS = ("semantic_fpn", "upernet")


def tiny_scenes(folder: Path, train: int = 7, val: int = 4) -> Path:
    """Scenes of 64 px in folder, in both formats."""
    list(make_scenes(folder, train, val, SIZE, 0))
    return folder


def write_dense_recipe(folder: Path, scenes: Path, framework: str, **groups) -> Path:
    """Two epochs of a framework on the scenes, with groups merged over them; the run goes to folder/run."""
    detects = framework not in SEGMENTORS
    source = {"name": "coco", "root": str(scenes / "detection"), "needs_masks": framework != "retinanet"}
    if not detects:
        source = {"name": "ade20k", "root": str(scenes / "segmentation"), "crop": [SIZE, SIZE]}
    values = {
        "seed": 3,
        "folder": str(folder / "run"),
        "model": {"framework": framework, "backbone": "mavit_nano", "drop_path_rate": 0.2, "heads": HEADS[framework]},
        "task": {"name": "detection" if detects else "segmentation"},
        "optimizer": {"lr": 1e-3, "not_decayed": "norms"},
        "schedule": {"name": "steps", "warmup_steps": 2, "decay_epochs": [1]},
        "data": source | {"long_side": SIZE, "short_side": SIZE, "flip": 0.5, "batch_size": 2, "num_workers": 0},
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
    }
    return write_merged(folder / "dense.yaml", values, groups)


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

"""Recipes of decoders that train in seconds on text that is written here."""

from pathlib import Path

from tiny_run import write_merged

SIZES = {"width": 16, "depth": 2, "heads": 2, "hidden": 24}


def write_texts(folder: Path) -> Path:
    """Sentences to train on and in val/ other ones, as .txt files."""
    (folder / "val").mkdir(parents=True)
    for number in range(12):
        path = folder / ("val" if number % 4 == 0 else ".") / f"{number}.txt"
        path.write_text(f"The number {number} comes before {number + 1}; its square is {number * number}.\n" * 8)
    return folder


def write_language_recipe(folder: Path, mechanism: str = "mala", **groups) -> Path:
    """Three epochs of four batches on write_texts, as folder/tiny.yaml; the run goes to folder/run."""
    texts = folder / "texts"
    values = {
        "folder": str(folder / "run"),
        "seed": 1,
        "model": {"name": "sequence_nano", "mechanism": mechanism, **SIZES},
        "task": {"name": "language", "ema_decay": 0.5},
        "optimizer": {"lr": 1e-2},
        "data": {
            "name": "textfolder",
            "root": str(texts if texts.is_dir() else write_texts(texts)),
            "context": 40,
            "batch_size": 4,
        },
        "trainer": {"max_epochs": 3, "accelerator": "cpu", "limit_train_batches": 4},
    }
    return write_merged(folder / "tiny.yaml", values, groups)

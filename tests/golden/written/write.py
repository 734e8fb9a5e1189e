"""Writes the files next to it: what linvit wrote on the day that `about.json` names, for later versions to read.

    python tests/golden/written/write.py

A file that a user has must go on being read, so do not write these again: if a format changes on purpose, add files.
The networks have some ten thousand parameters and are trained for three or four steps, so that everything is small.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

TINY = {"widths": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "final_width": 16}
CLASSIFIER = {"name": "ravlt_nano", "pattern": "LLLS", "drop_path_rate": 0.1, **TINY}
STOPPED_AT = 2  # the step before which the classifier's training was stopped, in the middle of its second epoch


def noise(*shape: int) -> torch.Tensor:
    """Normal numbers, float64, the same everywhere."""
    return torch.from_numpy(np.random.RandomState(0).standard_normal(shape))


def pixels() -> np.ndarray:
    """An RGB image, 37 × 29 px."""
    return np.random.RandomState(0).randint(0, 256, (37, 29, 3)).astype(np.uint8)


# What each network computes of fixed inputs, as tensors.
OUTPUTS = {
    "classification": lambda network: [network(noise(2, 3, 32, 32))],
    "detection": lambda network: list(network.candidates(noise(1, 3, 64, 64))),
    "segmentation": lambda network: [network(noise(1, 3, 64, 64))],
    "speech": lambda network: [network(noise(1, 21, 16))[0]],
    "language": lambda network: [network(torch.arange(40)[None] * 5 % 256)],
}


def probed(outputs: list[torch.Tensor]) -> list[dict]:
    """Shape, largest value and 32 values at evenly spaced flat positions of each tensor."""
    records = []
    for tensor in outputs:
        flat = tensor.detach().double().flatten()
        places = torch.linspace(0, len(flat) - 1, 32).long()
        records.append(
            {"shape": list(tensor.shape), "largest": flat.abs().max().item(), "values": flat[places].tolist()}
        )
    return records


def train(folder: Path) -> None:
    """Trains the tiny networks, and keeps their checkpoints."""
    from tiny_dense import tiny_scenes, write_dense_recipe
    from tiny_language import write_language_recipe
    from tiny_run import At, press_ctrl_c, write_recipe
    from tiny_speech import write_speech_recipe

    from linvit.runs.folder import RunStoppedError
    from linvit.runs.training import train_folder

    temporary, started_in = Path(tempfile.mkdtemp()), Path.cwd()
    os.chdir(temporary)  # so that recipes, which checkpoints store, have relative paths
    for task in OUTPUTS:
        Path(task).mkdir()
    scenes = tiny_scenes(Path("scenes"), 4, 2)
    few = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1}
    dense = {"model": {"backbone": "mavit_nano", **TINY, "heads": {"width": 8}}, "trainer": few}
    recipes = [
        write_recipe(Path("classification"), model=CLASSIFIER, trainer=few),
        write_dense_recipe(Path("detection"), scenes, "retinanet", **dense),
        write_dense_recipe(Path("segmentation"), scenes, "semantic_fpn", **dense),
        write_speech_recipe(Path("speech"), model={"width": 8}, trainer=few),
        write_language_recipe(Path("language"), model={"width": 8, "hidden": 12}, trainer=few),
    ]
    for task, recipe in zip(OUTPUTS, recipes, strict=True):
        stops = task == "classification"
        try:
            train_folder(recipe, callbacks=[At(STOPPED_AT, press_ctrl_c)] if stops else [])
        except RunStoppedError:
            assert stops
        for name in ["checkpoints/last.ckpt", *(["recipe.yaml", "metrics.csv"] if stops else [])]:
            (folder / task / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(recipe.parent / "run" / name, folder / task / name)
        if not stops:  # two thirds of the file, which only a run that goes on needs
            path = folder / task / "checkpoints" / "last.ckpt"
            torch.save({**torch.load(path, weights_only=True), "optimizer_states": []}, path)
    shutil.copy2(recipes[0], folder / "classification.yaml")
    os.chdir(started_in)
    shutil.rmtree(temporary)


def export(folder: Path) -> None:
    """Writes the classifier in the other formats, and what every network gives."""
    import linvit

    run = linvit.load_run(folder / "classification")
    run.save_weights(folder / "weights.safetensors")
    linvit.push(run, "someone/tiny", folder=folder / "hub", dry_run=True)
    for name in ("network.onnx", "network.xml", "network.pt2"):
        run.export(folder / name)
    about = {
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True).strip(),
        "versions": {"linvit": linvit.__version__, "torch": torch.__version__},
        "predictions": [list(pair) for pair in run.predict(pixels())[0].pairs],
    }
    with torch.inference_mode():
        for task, outputs in OUTPUTS.items():
            about[task] = probed(outputs(linvit.load_run(folder / task).network.double()))
        for name in ("network.onnx", "network.xml", "network.pt2"):
            about[name] = probed([linvit.load_run(folder / name).network(noise(1, 3, 32, 32).float())])
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(HERE)
    export(HERE)

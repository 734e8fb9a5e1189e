import json
import subprocess
import sys

import pytest
import torch
from imagenet_folder import write_imagenet
from tiny_run import write_recipe

from linvit.runs import load_run
from linvit.runs.training import train_folder

IN_TWO_PROCESSES = """
import json, sys
from linvit.runs import load_run

several = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
measured = load_run(sys.argv[1]).evaluate(num_workers=0, trainer=several).by_weights
with open(f"{sys.argv[2]}/{__import__('torch').distributed.get_rank()}.json", "w") as file:
    json.dump(measured, file)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    data = {"name": "imagefolder", "root": str(write_imagenet(folder / "imagenet")), "size": 32, "num_workers": 0}
    recipe = write_recipe(folder, data=data | {"batch_size": 2, "max_shift": None}, trainer={"max_epochs": 1})
    recipe.write_text(recipe.read_text().replace("  max_shift: null\n", ""))
    return train_folder(recipe)


@pytest.mark.slow
def test_seven_images_in_two_processes_count_once_and_measure_the_same(run, tmp_path):
    (tmp_path / "eval.py").write_text(IN_TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(tmp_path / "eval.py"), str(run), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    alone = load_run(run).evaluate(num_workers=0, trainer={"accelerator": "cpu", "devices": 1}).by_weights
    assert zero == one
    for kind in ("raw", "ema"):
        assert zero[kind]["images"] == alone[kind]["images"] == 7
        assert zero[kind] == pytest.approx(alone[kind], rel=1e-6)
    assert torch.isfinite(torch.tensor(alone["raw"]["loss"]))

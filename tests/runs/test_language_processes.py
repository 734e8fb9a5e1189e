import os
import subprocess
import sys

import pytest
import torch
from tiny_language import write_language_recipe
from tiny_run import content, curve

from linvit.runs import load_run
from linvit.runs.training import train_folder

SHARDED = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}


@pytest.mark.slow
def test_two_processes_with_shards_of_the_weights_train_as_one_with_all(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    common = {"task": {"ema_decay": None}, "optimizer": {"not_decayed": "none"}}
    clipped = {"gradient_clip_val": 1.0}
    whole = train_folder(write_language_recipe(one, **common, trainer=clipped))
    recipe = write_language_recipe(
        two, **common, data={"batch_size": 2}, trainer={**clipped, "devices": 2, "strategy": SHARDED}
    )
    command = [sys.executable, "-m", "linvit_cli", "train", str(recipe)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    run = two / "run"
    for ours, theirs in zip(curve(run), curve(whole), strict=True):
        assert float(ours["bits_per_byte"]) == pytest.approx(float(theirs["bits_per_byte"]), rel=1e-4)
    weights, expected = (content(folder)["state_dict"] for folder in (run, whole))
    names = [name for name in expected if name.startswith("network.")]
    assert len(names) > 15
    assert max((weights[name] - expected[name]).abs().max() for name in names) < 1e-3
    assert all(type(weights[name]) is torch.Tensor for name in names)
    measured = load_run(run).evaluate().by_weights["raw"]
    assert measured["bits_per_byte"] == pytest.approx(float(curve(run)[-1]["bits_per_byte"]), abs=0.2)

import os
import subprocess
import sys

import pytest
from tiny_run import content, curve
from tiny_speech import write_speech_recipe

from linvit.runs import load_run
from linvit.runs.training import train_folder


@pytest.mark.slow
def test_two_processes_train_and_count_errors_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    common = {"task": {"ema_decay": None}, "model": {"conv_norm": "layer"}}
    plain = {"bands": 0, "times": 0}
    whole = train_folder(write_speech_recipe(one, **common, data=plain))
    recipe = write_speech_recipe(
        two, **common, data={**plain, "batch_size": 2}, trainer={"devices": 2, "strategy": "ddp"}
    )
    command = [sys.executable, "-m", "linvit_cli", "train", str(recipe)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for ours, theirs in zip(curve(two / "run"), curve(whole), strict=True):
        assert ours["utterances"] == theirs["utterances"] == "6.0"
        assert float(ours["wer"]) == pytest.approx(float(theirs["wer"]), abs=0.07)  # one word of fifteen
        assert float(ours["val_loss"]) == pytest.approx(float(theirs["val_loss"]), rel=1e-3)
    weights, expected = (content(folder)["state_dict"] for folder in (two / "run", whole))
    assert max((weights[name] - expected[name]).abs().max() for name in expected if name.startswith("network.")) < 1e-3
    measured = load_run(two / "run").evaluate().by_weights["raw"]
    rates = {float(row["wer"]) for row in curve(two / "run")}
    assert measured["wer"] == pytest.approx(min(rates))

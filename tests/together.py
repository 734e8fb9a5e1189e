"""Trains in processes that exchange gradients, NCCL alone and gloo in two on one GPU, against one without exchange.

`python tests/together.py [cpu]` needs no installed linvit and no network. In float64 only losses are rounded: a
float32 mean over BATCHES batches is so BATCHES + 2 times at most, and two are compared, hence ALLOWED.
"""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory

SECONDS, BATCHES, ALLOWED = 120, 4, 12 * 2.0**-24
SAME = "demo/ravlt_nano_digits model.drop_path_rate=0.0 trainer.precision=64-true trainer.devices=1 data.batch_size=16"
SHORT = f"trainer.max_epochs=2 trainer.limit_train_batches={BATCHES} trainer.limit_val_batches={BATCHES}"
NETWORKS = {"gpu": "ravlt_nano", "cpu": "test_vit"}  # SyncBatchNorm needs a GPU: on a CPU no batch norm
GLOO = "trainer.strategy={class_path: DDPStrategy, init_args: {process_group_backend: gloo}}"


def nccl_alone(accelerator: str = "gpu") -> dict[str, object]:
    """One process with ddp (NCCL; on a CPU gloo) against one without: training and validation loss, epoch by epoch.

    Raises RuntimeError if a run fails or takes more than SECONDS, or if losses differ by more than ALLOWED of theirs.
    """
    return _compared(accelerator, 1, ["trainer.strategy=ddp"])


def gloo_pair(accelerator: str = "gpu") -> dict[str, object]:
    """Two processes, which NCCL refuses on one GPU, with half of each batch, against one; raises as `nccl_alone`."""
    halves = ["data.batch_size=8", f"trainer.sync_batchnorm={accelerator == 'gpu'}"]
    return _compared(accelerator, 2, ["trainer.num_nodes=2", GLOO, *halves])  # one GPU a machine


def _compared(accelerator: str, processes: int, overrides: list[str]) -> dict[str, object]:
    usual = f"{SAME} {SHORT} model.name={NETWORKS[accelerator]} trainer.accelerator={accelerator}".split()
    (alone, _), (together, nccl) = _losses(1, usual), _losses(processes, usual + overrides)
    difference = max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True))
    if not difference <= ALLOWED:
        raise RuntimeError(f"losses {alone} and {together} differ by {difference:.1e}, allowed {ALLOWED:.1e}")
    return {"overrides": overrides, "alone": alone, "together": together, "difference": difference, "nccl": nccl}


def _losses(processes: int, arguments: list[str]) -> tuple[list[float], str | None]:
    """Also the line in which NCCL says its version, None if it did not start."""
    with create_server(("127.0.0.1", 0)) as unused:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1]), "NCCL_DEBUG": "VERSION"}
    with TemporaryDirectory() as place, open(Path(place, "log"), "w") as log:
        command = [sys.executable, "-m", "linvit_cli", "train", *arguments, f"folder={place}/run"]
        ranks = [os.environ | shared | {"NODE_RANK": str(rank), "RANK": str(rank)} for rank in range(processes)]
        end, root = time.monotonic() + SECONDS, Path(__file__).parents[1]
        started = [subprocess.Popen(command, cwd=root, env=each, stdout=log, stderr=log) for each in ranks]
        while None in (codes := [each.poll() for each in started]) and not any(codes) and time.monotonic() < end:
            time.sleep(0.1)
        for process in started:
            process.kill()
        lines = Path(log.name).read_text().splitlines()
        if codes != [0] * processes:
            raise RuntimeError("\n".join([f"{' '.join(command)} ended with {codes}", *lines[-20:]]))
        rows = list(csv.DictReader(Path(place, "run", "metrics.csv").read_text().splitlines()))
    nccl = next((line for line in lines if "NCCL version" in line), None)
    return [float(row[name]) for row in rows for name in ("train_loss", "val_loss")], nccl


if __name__ == "__main__":
    print(json.dumps([nccl_alone(*sys.argv[1:]), gloo_pair(*sys.argv[1:])], indent=1))

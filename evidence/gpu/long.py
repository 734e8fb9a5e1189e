"""The job `long`: students of one softmax teacher, aligned at up to 16,384 tokens; see evidence/long_sequences.py."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from evidence.gpu.cifar import unpacked
from evidence.gpu.jobs import Case, Results
from evidence.long_sequences import SIDES, Images, Sizes, cells, rows_of, study
from evidence.rows import ROOT

CODE = ("evidence/long_sequences.py", "linvit/ops", "linvit/layers", "linvit/kernels")
TOY = Sizes((16, 8), (4, 2, 2), (4, 2, 2))


def cases(toy: bool) -> list[Case]:
    lengths = tuple(SIDES)[: 1 if toy else None]
    return [Case(f"up to {lengths[-1]:,} tokens", partial(measured, lengths, toy), CODE)]


def measured(lengths: tuple[int, ...], toy: bool) -> Results:
    """After a stop the same call goes on with the step at which it stopped."""
    runs = ROOT / "runs" / "evidence" / "long-gpu"
    if not toy:
        study(Images.of(str(unpacked()), "cuda"), runs, runs / "ledger.jsonl", lengths)
        return {"cells": cells(rows_of(runs / "ledger.jsonl"))}
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8, generator=draw)
    split = pixels, torch.arange(32) % 10
    with TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        noise = Images(split, split, torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25))
        study(noise, Path(folder), ledger, lengths, TOY)
        return {"cells": cells(rows_of(ledger))}

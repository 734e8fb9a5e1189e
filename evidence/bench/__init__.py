"""Kinds of benchmarks that only our own pages need; importing this package adds them to those of `linvit bench`."""

from typing import Any

from evidence.bench import decoding, precision, sampling, segmentation, streaming
from linvit.bench import page
from linvit.bench.kinds import KINDS

OURS: dict[str, Any] = {
    "decoding": decoding,
    "sampling": sampling,
    "memory": segmentation,
    "streaming": streaming,
    "precision": precision,
}
KINDS.update(OURS)
page.COLUMNS.update({name: kind.COLUMNS for name, kind in OURS.items()})

"""Kinds of benchmarks that only our own pages need; importing this package adds them to those of `linvit bench`."""

from evidence.bench import decoding, precision, sampling, segmentation, streaming
from linvit.bench import page
from linvit.bench.kinds import KINDS

OURS = {
    "decoding": decoding,
    "sampling": sampling,
    "memory": segmentation,
    "streaming": streaming,
    "precision": precision,
}
COLUMNS = {
    "decoding": decoding.COLUMNS,
    "sampling": sampling.COLUMNS,
    "memory": page.OF_NETWORKS,
    "streaming": page.OF_NETWORKS,
    "precision": precision.COLUMNS,
}
KINDS.update(OURS)
page.COLUMNS.update(COLUMNS)

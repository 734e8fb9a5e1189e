"""Benchmarks that only our own pages need; importing this package adds them to those of `linvit bench`."""

from evidence.bench import accuracy, curves, decoding, precision, sampling, segmentation, streaming
from linvit.bench import page
from linvit.bench.kinds import KINDS, Kind

for name, module in {
    "curves": curves,
    "decoding": decoding,
    "sampling": sampling,
    "memory": segmentation,
    "streaming": streaming,
    "precision": precision,
}.items():
    KINDS[name] = Kind(module.Options, module.measure)
    page.COLUMNS[name] = module.COLUMNS
page.COLUMNS["model"]["published top-1, %"] = accuracy.top1
page.FURTHER += [accuracy.figures, curves.figures]

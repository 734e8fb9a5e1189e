"""Exported networks in other runtimes, if they are installed."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from linvit.bench.clock import TensorsCall
from linvit.deploy.formats import FORMATS, session_of
from linvit.deploy.graph import exported
from linvit.fusion import fuse

PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def runtime_call(suffix: str, network: nn.Module, x: Tensor, threads: int) -> TensorsCall:
    """The network, folded and written to a file of that format, in its runtime on the CPU.

    x: images; the runtime computes in their dtype.

    Raises:
        ImportError: if a package is missing.
        ValueError: if the network cannot be exported, or the runtime does not compute in that dtype.
    """
    runtime = FORMATS[suffix]
    runtime.need()
    precision = PRECISIONS.get(x.dtype)
    if precision is None or precision not in runtime.precisions:
        known = " and ".join(runtime.precisions)
        raise ValueError(f"{runtime.name} computes in {known} here, not in {precision or x.dtype}")
    images = x.float().contiguous()
    with TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        path = Path(folder) / f"network{suffix}"
        program = exported(fuse(deepcopy(network).float(), "graph"), images.clone())
        session = session_of(runtime, program, "", path, ["outputs"], threads, precision)
    assert session is not None  # the runtimes below run on every system
    return lambda: session(images)


RUNTIMES: dict[str, Callable[[nn.Module, Tensor, int], TensorsCall]] = {
    "onnxruntime": partial(runtime_call, ".onnx"),
    "openvino": partial(runtime_call, ".xml"),
    "executorch": partial(runtime_call, ".pte"),
}

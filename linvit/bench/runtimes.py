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
from linvit.deploy.quantizing import need_int8, quantized
from linvit.fusion import fuse

PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def runtime_call(suffix: str, network: nn.Module, x: Tensor, threads: int, int8: bool = False) -> TensorsCall:
    """The network, folded and written to a file of that format, in its runtime on the CPU.

    x: images; the runtime computes in their dtype. int8: whether layers with weights are in 8 bits, calibrated on x.

    Raises:
        ImportError: if a package is missing.
        ValueError: if the network cannot be exported, or the runtime does not compute in that dtype.
    """
    runtime = FORMATS[suffix]
    runtime.need()
    if int8:
        need_int8(suffix)
    precision = PRECISIONS.get(x.dtype)
    if precision is None or precision not in runtime.precisions:
        known = " and ".join(runtime.precisions)
        raise ValueError(f"{runtime.name} computes in {known} here, not in {precision or x.dtype}")
    images = x.float().contiguous()
    with TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        path = Path(folder) / f"network{suffix}"
        program = exported(fuse(deepcopy(network).float(), "graph"), images.clone())
        program = quantized(program, images, suffix, dynamic=False) if int8 else program
        session = session_of(runtime, program, "", path, ["outputs"], threads, precision)
    return lambda: session(images)


RUNTIMES: dict[str, Callable[[nn.Module, Tensor, int, bool], TensorsCall]] = {
    "onnxruntime": partial(runtime_call, ".onnx"),
    "openvino": partial(runtime_call, ".xml"),
    "executorch": partial(runtime_call, ".pte"),
}

"""Exported networks in other runtimes, if they are installed."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from linvit.bench.clock import TensorsCall
from linvit.files import reason_of


@contextmanager
def _exported(network: nn.Module, x: Tensor) -> Iterator[Path]:
    """The network as an ONNX file for images of this shape.

    Raises:
        ImportError: if a package for exporting is missing.
        ValueError: if the network cannot be exported; the message says why.
    """
    _need("onnx", "onnxscript")
    if x.dtype != torch.float32:
        raise ValueError("other runtimes are measured in float32 alone")
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "network.onnx"
        try:
            with torch.inference_mode(False), torch.no_grad():
                torch.onnx.export(network, (x.clone(),), str(path), dynamo=True, verbose=False, external_data=False)
        except Exception as error:  # the exporter raises errors of many classes
            raise ValueError(f"export to ONNX failed: {reason_of(error)}") from error
        yield path


def _need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f"needs {' and '.join(missing)}, which pip installs", name=missing[0])


def onnxruntime_call(network: nn.Module, x: Tensor, threads: int) -> TensorsCall:
    """The exported network through ONNX Runtime on the CPU; raises as _exported."""
    _need("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with _exported(network, x) as path:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.cpu().numpy()}
    return lambda: (torch.from_numpy(session.run(None, inputs)[0]),)


def openvino_call(network: nn.Module, x: Tensor, threads: int) -> TensorsCall:
    """The exported network through OpenVINO on the CPU; raises as _exported."""
    _need("openvino")
    import openvino

    with _exported(network, x) as path:
        model = openvino.Core().read_model(path)
        settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    array = x.cpu().numpy()
    return lambda: (torch.from_numpy(request.infer([array], share_inputs=True, share_outputs=True)[0]),)

"""How far the recognizer in PyTorch is from its ONNX file: onnxruntime in float32, onnx's own evaluator in float64."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evidence.text_lines import Line, by_width, normalized
from evidence.text_recognizer import Recognizer, decode, load_recognizer


@torch.inference_mode()
def equality(recognizer: Recognizer, model: Path, lines: Sequence[Line], characters: list[str]) -> dict[str, Any]:
    """Of each line the largest difference of two outputs (probabilities): their median and maximum over the lines.

    ours: of our network and onnxruntime. theirs: of onnxruntime and itself without optimizing the graph. exact: of our
    network and the graph, both in float64, on one line in fifty. same: lines in which onnxruntime reads the same.
    """
    from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

    plain = SessionOptions()
    plain.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [InferenceSession(model, options, providers=["CPUExecutionProvider"]) for options in (None, plain)]
    ours, theirs, same = [], [], 0
    for image in _images(lines):
        given = recognizer(image).softmax(-1)
        wanted, other = (torch.from_numpy(session.run(None, {"x": image.numpy()})[0]) for session in sessions)
        ours.append(_largest(given, wanted))
        theirs.append(_largest(other, wanted))
        same += decode(given.argmax(-1), characters) == decode(wanted.argmax(-1), characters)
    network, graph = load_recognizer(model)[0].double(), float64_graph(model)
    exact = [
        _largest(
            network(image.double()).softmax(-1), torch.from_numpy(graph.run(None, {"x": image.double().numpy()})[0])
        )
        for image in _images(lines[::50])
    ]
    differences = {"ours": ours, "theirs": theirs, "exact": exact}
    measures: dict[str, Any] = {name: [median(values), max(values)] for name, values in differences.items()}
    return measures | {"lines": len(lines), "same": same, "exact_lines": len(exact)}


def _images(lines: Sequence[Line]) -> list[Tensor]:
    return [normalized(image).contiguous() for _, group in by_width(lines).values() for image in group.split(1)]


def _largest(given: Tensor, wanted: Tensor) -> float:
    return (given - wanted).abs().max().item()


def float64_graph(path: Path) -> Any:
    """The graph in an ONNX file with all its constants in float64, to be run by onnx's evaluator."""
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class BatchNormalization(OpRun):
        """By the stored statistics; onnx's own, of this version of the operator, takes those of the batch."""

        def _run(self, x: Any, scale: Any, shift: Any, mean: Any, variance: Any, epsilon: float, **_: Any) -> Any:
            factor = scale / np.sqrt(variance + epsilon)
            return ((x - mean[:, None, None]) * factor[:, None, None] + shift[:, None, None],)

    model = onnx.load(path)
    for node in model.graph.node:
        constant = node.attribute[0].t if node.op_type == "Constant" else None
        if constant is not None and constant.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(constant).astype(np.float64)
            constant.CopyFrom(onnx.numpy_helper.from_array(values, constant.name))
    return ReferenceEvaluator(model, new_ops=[BatchNormalization])

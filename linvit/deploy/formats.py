"""The formats of exported files: how each is written, and how its runtime runs it on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linvit.deploy.facts import KEY, Facts

Session = Callable[[Tensor], Tensor]
"""From uint8 images (batch, channels, height, width) to the network's float32 outputs."""


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    name: in messages. suffix: of its files. extra: of linvit, which installs `packages`. write: writes a program with
    its facts to a path. open: the facts in a file, and its session with this many threads (None: the runtime's choice).
    """

    name: str
    suffix: str
    extra: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Facts, Path], None]
    open: Callable[[Path, int | None], tuple[Facts, Session]]

    def need(self) -> None:
        """Raises ImportError, naming the extra, if a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise ImportError(
                f"{self.name} needs {' and '.join(missing)}: install it with `pip install 'linvit[{self.extra}]'`."
            )


def _write_onnx(program: ExportedProgram, facts: Facts, path: Path) -> None:
    onnx = torch.onnx.export(
        program, dynamo=True, verbose=False, external_data=False, input_names=["images"], output_names=["outputs"]
    )
    assert onnx is not None
    onnx.model.metadata_props[KEY] = facts.to_json()
    onnx.save(str(path), external_data=False)


def _open_onnx(path: Path, threads: int | None) -> tuple[Facts, Session]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    facts = Facts.from_json(session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return facts, run


def _write_openvino(program: ExportedProgram, facts: Facts, path: Path) -> None:
    import openvino

    model = openvino.convert_model(program)
    model.set_rt_info(facts.to_json(), KEY)
    openvino.save_model(model, path, compress_to_fp16=False)


def _open_openvino(path: Path, threads: int | None) -> tuple[Facts, Session]:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    facts = Facts.from_json(str(model.get_rt_info(KEY).astype(str)) if model.has_rt_info(KEY) else None, path)
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return facts, lambda images: torch.from_numpy(request.infer([images.numpy()])[0].copy())


def _write_pt2(program: ExportedProgram, facts: Facts, path: Path) -> None:
    torch.export.save(program, path, extra_files={KEY: facts.to_json()})


def _open_pt2(path: Path, threads: int | None) -> tuple[Facts, Session]:
    extra = {KEY: ""}
    module = torch.export.load(path, extra_files=extra).module(check_guards=False)  # 32 px would be refused
    facts = Facts.from_json(extra[KEY] or None, path)
    if threads:
        torch.set_num_threads(threads)

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = module(images)
        return outputs

    return facts, run


def _write_executorch(program: ExportedProgram, facts: Facts, path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    about = torch.tensor(list(facts.to_json().encode()), dtype=torch.uint8)  # a method that returns a constant
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods={KEY: about})
    path.write_bytes(lowered.to_executorch().buffer)


def _open_executorch(path: Path, threads: int | None) -> tuple[Facts, Session]:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)
    about = program.load_method(KEY).execute([])[0] if KEY in program.method_names else None
    facts = Facts.from_json(None if about is None else bytes(about.tolist()).decode(), path)
    method = program.load_method("forward")
    return facts, lambda images: method.execute([images])[0].clone()


FORMATS = {
    format.suffix: format
    for format in (
        Format("ONNX", ".onnx", "onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _open_onnx),
        Format("OpenVINO", ".xml", "openvino", ("openvino",), _write_openvino, _open_openvino),
        Format("torch.export", ".pt2", "", (), _write_pt2, _open_pt2),
        Format("ExecuTorch", ".pte", "executorch", ("executorch",), _write_executorch, _open_executorch),
    )
}
"""The formats by the suffix of their files."""


def format_of(path: Path) -> Format:
    """The format of a file, by its suffix; raises ValueError for others, and ImportError if its runtime is missing."""
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({format.name})" for suffix, format in FORMATS.items())
        raise ValueError(f"The file {path} has the suffix {path.suffix!r}, expected one of {known}: change it.")
    FORMATS[path.suffix].need()
    return FORMATS[path.suffix]

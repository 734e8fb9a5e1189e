"""The formats of exported files: how each is written, and how its runtime runs it on this machine."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linvit.deploy.facts import KEY, Facts, FactsError
from linvit.deploy.pt2 import check_plain
from linvit.files import reason_of

Session = Callable[[Tensor], tuple[Tensor, ...]]
"""From images (batch, channels, height, width) to the network's outputs."""
FLOAT32 = ("float32",)


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    name: in messages. suffix: of its files. extra: of linvit, which installs `packages`. write: writes a program with
    facts, as text, to a path, and names its outputs. open: the text in a file, None if it has none, and its session
    with this many threads (None: the runtime's choice), which computes in one of `precisions`. smallest: side in pixels
    from which a file reads images of any size; 0 if it reads one size only.
    """

    name: str
    suffix: str
    extra: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, str, Path, Sequence[str]], None]
    open: Callable[[Path, int | None, str], tuple[str | None, Session]]
    smallest: int
    precisions: tuple[str, ...] = FLOAT32

    def need(self) -> None:
        """Raises ImportError, naming the extra, if a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise ImportError(
                f"{self.name} needs {', '.join(missing)}: install it with `pip install 'linvit[{self.extra}]'`."
            )


def _as_onnx(program: ExportedProgram, outputs: Sequence[str]) -> Any:
    onnx = torch.onnx.export(
        program, dynamo=True, verbose=False, external_data=False, input_names=["images"], output_names=outputs
    )
    assert onnx is not None
    for node in onnx.model.graph.all_nodes():  # notes of the exporter, a tenth of the file
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    return onnx


def _write_onnx(program: ExportedProgram, facts: str, path: Path, outputs: Sequence[str]) -> None:
    onnx = _as_onnx(program, outputs)
    onnx.model.metadata_props[KEY] = facts
    onnx.save(str(path), external_data=False)


def _open_onnx(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))

    return session.get_modelmeta().custom_metadata_map.get(KEY), run


def _write_openvino(program: ExportedProgram, facts: str, path: Path, outputs: Sequence[str]) -> None:
    import openvino

    # By way of ONNX: files from torch's programs are a tenth slower.
    model = openvino.Core().read_model(_as_onnx(program, outputs).model_proto.SerializeToString())
    model.set_rt_info(facts, KEY)
    openvino.save_model(model, path, compress_to_fp16=False)


def _open_openvino(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[precision]}
    if threads:
        settings |= {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(values.copy()) for values in request.infer([images.numpy()]).values())

    return str(model.get_rt_info(KEY).astype(str)) if model.has_rt_info(KEY) else None, run


def _write_pt2(program: ExportedProgram, facts: str, path: Path, outputs: Sequence[str]) -> None:
    torch.export.save(program, path, extra_files={KEY: facts})


def _open_pt2(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    check_plain(path)
    extra = {KEY: ""}
    module = torch.export.load(path, extra_files=extra).module(check_guards=False)  # 32 px would be refused
    if threads:
        torch.set_num_threads(threads)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(module(images))

    return extra[KEY] or None, run


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drops what ExecuTorch prints about the processor and about its own use of torch: nobody can act on it."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _write_executorch(program: ExportedProgram, facts: str, path: Path, outputs: Sequence[str]) -> None:
    with silent_stderr():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

    about = torch.tensor(list(facts.encode()), dtype=torch.uint8)  # a method that returns a constant
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods={KEY: about})
    path.write_bytes(lowered.to_executorch().buffer)


def _open_executorch(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    with silent_stderr():
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(path)
        about = program.load_method(KEY).execute([])[0] if KEY in program.method_names else None
        method = program.load_method("forward")

    def run(images: Tensor) -> tuple[Tensor, ...]:
        return tuple(values.clone() for values in method.execute([images]))

    return None if about is None else bytes(about.tolist()).decode(), run


ONNX = ("onnx", "onnxscript")
FORMATS = {
    format.suffix: format
    for format in (
        Format("ONNX", ".onnx", "onnx", (*ONNX, "onnxruntime"), _write_onnx, _open_onnx, 32),
        Format(
            "OpenVINO",
            ".xml",
            "openvino",
            (*ONNX, "openvino"),
            _write_openvino,
            _open_openvino,
            32,
            (*FLOAT32, "bfloat16"),
        ),
        Format("torch.export", ".pt2", "", (), _write_pt2, _open_pt2, 64),
        Format("ExecuTorch", ".pte", "executorch", ("executorch",), _write_executorch, _open_executorch, 0),
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


def session_of(
    format: Format,
    program: ExportedProgram,
    facts: str,
    path: Path,
    outputs: Sequence[str],
    threads: int | None = None,
    precision: str = "float32",
) -> Session:
    """The session of a program, written to a file of the format.

    Raises ValueError for a program that the format or its runtime cannot take.
    """
    try:
        format.write(program, facts, path, outputs)
        return format.open(path, threads, precision)[1]
    except Exception as error:  # converters raise errors of many classes
        raise ValueError(f"{format.name} cannot take this network ({reason_of(error)}).") from error


def opened(path: Path, threads: int | None = None) -> tuple[Facts, Session]:
    """The facts in a file, and its session.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the runtime is missing.
        ValueError: for another suffix, a damaged file, and one that linvit did not write.
    """
    format = format_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"The file {path} does not exist: check the path.")
    try:
        text, session = format.open(path, threads, "float32")
        return Facts.from_json(text, path), session
    except FactsError:
        raise
    except Exception as error:  # runtimes raise errors of many classes
        raise ValueError(f"{format.name} cannot read {path} ({reason_of(error)}): export it again.") from error

"""The formats of exported files: how each is written, and how its runtime runs it on this machine."""

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from linvit.data.disk import check_regular
from linvit.deploy import pt2
from linvit.deploy.compiled import check_compiler, open_compiled, write_compiled
from linvit.deploy.coreml import PACKAGE, open_coreml, write_coreml
from linvit.deploy.facts import KEY, Facts, FactsError, SequenceFacts, facts_in
from linvit.deploy.runtime import Session, silent_stderr
from linvit.deploy.xnnpack import for_xnnpack
from linvit.errors import SettingError
from linvit.files import reason_of

FLOAT32 = ("float32",)


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    name: in messages. suffix: of its files. extra: of linvit, which installs `packages`. write: writes a program with
    facts, as text, to a path, and names its inputs and outputs. open: the text in a file, None if it has none, and its
    session with this many threads (None: the runtime's choice), which computes in one of `precisions`; no session where
    the runtime does not run. smallest: side in pixels from which a file reads images of any size; 0 if it reads one
    size only. pixels: dtype of the images that the program reads. tolerance: difference from the network at which a
    file is not kept, as a share of the largest output.
    """

    name: str
    suffix: str
    extra: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, str, Path, Sequence[str], Sequence[str]], None]
    open: Callable[[Path, int | None, str], tuple[str | None, Session | None]]
    smallest: int
    precisions: tuple[str, ...] = FLOAT32
    pixels: torch.dtype = torch.uint8
    tolerance: float = 1e-4  # what rounding leaves in float32 is a hundred times less

    def need(self) -> None:
        """Raises ImportError, naming the extra, if a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise ImportError(
                f"{self.name} needs {', '.join(missing)}: install it with `pip install 'linvit[{self.extra}]'`."
            )


def _as_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], opset: int | None = None) -> Any:
    with silent_stderr():
        onnx = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs, opset_version=opset
        )
    assert onnx is not None
    graph = onnx.model.graph
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    names: dict[str, str] = {}  # of dynamic sizes, which torch calls s34 and the like
    for value, name in zip(graph.inputs, inputs, strict=True):
        for size, axis in zip(value.shape or (), AXES.get(name, ("batch", "heads", "past")), strict=False):
            if not isinstance(size, int):
                names.setdefault(str(size), axis)
    for value in values:
        value.metadata_props.clear()  # notes of the exporter, a tenth of the file
        if value.shape is not None and names:
            sizes = [
                x if isinstance(x, int) else SYMBOL.sub(lambda s: names.get(s[0], s[0]), str(x)) for x in value.shape
            ]
            value.shape = type(value.shape)(sizes)
    for node in graph.all_nodes():
        node.metadata_props.clear()
    return onnx


def _write_onnx(
    program: ExportedProgram,
    facts: str,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int | None = None,
) -> None:
    onnx = _as_onnx(program, inputs, outputs, opset)
    onnx.model.metadata_props[KEY] = facts
    onnx.save(str(path))  # weights of more than 2 GB go to a second file


def _open_onnx(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        arrays = (values.numpy() for values in inputs)
        return tuple(map(torch.from_numpy, session.run(None, dict(zip(names, arrays, strict=True)))))

    return session.get_modelmeta().custom_metadata_map.get(KEY), run


@cache
def openvino_core() -> Any:
    """The only Core of this process: each sets a stack for signals, and when closed may restore one that is freed."""
    import openvino

    return openvino.Core()


def _write_openvino(
    program: ExportedProgram, facts: str, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    import openvino

    # By way of ONNX: files from torch's programs are a tenth slower.
    model = openvino_core().read_model(_as_onnx(program, inputs, outputs).model_proto.SerializeToString())
    model.set_rt_info(facts, KEY)
    openvino.save_model(model, path, compress_to_fp16=False)


def _open_openvino(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    if not (weights := path.with_suffix(".bin")).is_file():
        raise ValueError(f"its weights, {weights.name}, are not beside it")
    core = openvino_core()
    model = core.read_model(path)
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[precision]}
    if threads:
        settings |= {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = request.infer([values.numpy() for values in inputs]).values()
        return tuple(torch.from_numpy(values.copy()) for values in outputs)

    return str(model.get_rt_info(KEY).astype(str)) if model.has_rt_info(KEY) else None, run


def _write_pt2(program: ExportedProgram, facts: str, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    torch.export.save(program, path, extra_files={KEY: facts})


def _open_pt2(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    text, program = pt2.read(path)
    if threads:
        torch.set_num_threads(threads)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return program(*inputs)

    return text, run


def _write_executorch(
    program: ExportedProgram, facts: str, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    with silent_stderr():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.exir.backend.canonical_partitioners.duplicate_dequant_node_pass import DuplicateDequantNodePass

    # Files with an empty tensor may not load.
    constants = {KEY: torch.tensor(list(facts.encode()), dtype=torch.uint8)} if facts else None
    lowered = to_edge_transform_and_lower(
        for_xnnpack(program),
        transform_passes=[DuplicateDequantNodePass()],  # XNNPACK fails where two steps read one dequantized tensor
        partitioner=[XnnpackPartitioner()],
        constant_methods=constants,
    )
    path.write_bytes(lowered.to_executorch().buffer)


def _open_executorch(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    with silent_stderr():
        from executorch.runtime import Runtime

        if path.read_bytes()[4:6] != b"ET":  # for which the runtime aborts the process
            raise ValueError("its first bytes are not those of an ExecuTorch file")
        program = Runtime.get().load_program(path)
        about = program.load_method(KEY).execute([])[0] if KEY in program.method_names else None
        method = program.load_method("forward")

    def run(images: Tensor) -> tuple[Tensor, ...]:
        # The runtime reads the memory in the order of its program, whatever the strides say.
        return tuple(values.clone() for values in method.execute([images.contiguous()]))

    return None if about is None else bytes(about.tolist()).decode(), run


AXES = {
    "images": ("batch", "channels", "height", "width"),
    "tokens": ("batch", "tokens"),
    "features": ("batch", "frames"),
}
SYMBOL = re.compile(r"s\d+")
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
        Format(
            "Core ML",
            PACKAGE,
            "coreml",
            ("coremltools",),
            write_coreml,
            open_coreml,
            0,
            ("float16",),
            torch.float32,
            1e-2,
        ),
    )
}
"""The formats by the suffix of their files."""

COMPILED = Format("AOTInductor", ".pt2", "", (), write_compiled, open_compiled, 64)
"""Machine code, which is written and run, but never opened: nobody can tell what it does."""


def format_of(path: Path, compiled: bool = False, opset: int | None = None) -> Format:
    """The format of a file, by its suffix, or COMPILED; opset: of a file for ONNX.

    Raises ValueError for other suffixes, and ImportError if the runtime or compiler is missing.
    """
    if opset is not None and path.suffix != ".onnx":
        raise SettingError(f"`opset` is for .onnx files, but {path} has the suffix {path.suffix!r}: leave `opset` out.")
    if compiled:
        if path.suffix != COMPILED.suffix:
            raise SettingError(
                f"The file {path} has the suffix {path.suffix!r}, but with `compiled` it must have .pt2: change it, or"
                " leave `compiled` out."
            )
        check_compiler()
        return COMPILED
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({format.name})" for suffix, format in FORMATS.items())
        raise ValueError(f"The file {path} has the suffix {path.suffix!r}, expected one of {known}: change it.")
    FORMATS[path.suffix].need()
    if opset is not None:
        return replace(FORMATS[path.suffix], write=partial(_write_onnx, opset=opset))
    return FORMATS[path.suffix]


def session_of(
    format: Format,
    program: ExportedProgram,
    path: Path,
    facts: str = "",
    inputs: Sequence[str] = ("images",),
    outputs: Sequence[str] = ("outputs",),
    threads: int | None = None,
    precision: str = "float32",
) -> Session | None:
    """The session of a program, written to a file of the format; None if the runtime does not run on this system.

    Raises ValueError for a program that the format or its runtime cannot take.
    """
    try:
        format.write(program, facts, path, inputs, outputs)
        return format.open(path, threads, precision)[1]
    except Exception as error:  # converters raise errors of many classes
        raise SettingError(
            f"{format.name} cannot take this network ({reason_of(error)}): try another format, or `dynamic=False` if"
            " the file is for any size."
        ) from error


def opened(path: Path, threads: int | None = None) -> tuple[Facts | SequenceFacts, Session]:
    """The facts in a file, and its session.

    The session of a file of images is a function from uint8 images (batch, channels, height, width) to its outputs.
    That of a decoder or Conformer takes the tensors that `facts.inputs` names and returns those of `facts.outputs`:
    int64 tokens (batch, tokens), or float32 features (batch, frames, mels); then the float32 states, of which those
    for the next call are returned.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the runtime is missing.
        ValueError: for another suffix, a damaged file, one that linvit did not write, and one whose runtime does not
            run on this system.
    """
    format = format_of(path)
    if not path.exists():
        raise FileNotFoundError(f"The file {path} does not exist: check the path.")
    try:
        for file in path.rglob("*.*") if format.suffix == PACKAGE and path.is_dir() else [path]:
            if file.suffix != ".CoreML":  # the folder in a package
                check_regular(file)
        text, session = format.open(path, threads, "float32")
        facts = facts_in(text, path)
    except FactsError:
        raise
    except Exception as error:  # runtimes raise errors of many classes
        reason = "it is damaged" if isinstance(error, AttributeError | TypeError) else reason_of(error)
        raise ValueError(f"{format.name} cannot read {path} ({reason}): export it again.") from error
    if session is None:
        raise ValueError(
            f"{path} cannot be run here, because {format.name} does not run on {platform.system()}: use it on a system"
            " where it does, or export to another format, such as .onnx."
        )

    return facts, FileSession(path, threads, facts, session)


class FileSession:
    """The session of a file that was opened; pickled, it is the file's path.

    Raises ValueError if the runtime fails, and FactsError for other outputs than the facts say.
    """

    def __init__(self, path: Path, threads: int | None, facts: Facts | SequenceFacts, session: Session) -> None:
        self._path, self._threads, self._facts, self._session = path, threads, facts, session

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        try:
            outputs = self._session(*inputs)
        except Exception as error:  # runtimes raise errors of many classes
            name = FORMATS[self._path.suffix].name
            raise ValueError(f"{name} cannot run {self._path} ({reason_of(error)}): export it again.") from error
        if len(outputs) != len(self._facts.outputs) or not all(output.dim() for output in outputs):
            said = len(self._facts.outputs)
            raise FactsError(f"{self._path} has {len(outputs)} outputs, but describes {said}: export it again.")
        return outputs

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._path.resolve(), self._threads)


def _reopened(path: Path, threads: int | None) -> Session:
    return opened(path, threads)[1]

"""How a program is written for each runtime, and run there.

A function write_… takes the program, facts about it as text, the path, and the names of inputs and outputs. A function
open_… takes the path, the number of threads (None: the runtime's choice) and the precision; it returns the facts, None
if there are none, and the session, None where the runtime does not run.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from platform import system
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram

from linvit.deploy import pt2
from linvit.deploy.facts import KEY
from linvit.deploy.graph import for_xnnpack
from linvit.files import explained

Names = Sequence[str]
Session = Callable[..., tuple[Tensor, ...]]
"""From the network's inputs, such as images (batch, channels, height, width), to its outputs."""
AXES = {
    "images": ("batch", "channels", "height", "width"),
    "tokens": ("batch", "tokens"),
    "features": ("batch", "frames"),
}
SYMBOL = re.compile(r"s\d+")
PACKAGE, MANIFEST = ".mlpackage", "Manifest.json"
"""The suffix of Core ML's folders, and the file that makes a folder one of them."""


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drops what converters and runtimes print about the processor, their progress and their use of torch."""
    kept = os.dup(2)
    # A StringIO, because packages imported here may keep a handler that writes to it: it must not be closed.
    with open(os.devnull, "w") as nowhere, redirect_stderr(io.StringIO()):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# ONNX Runtime


def as_onnx(program: ExportedProgram, inputs: Names, outputs: Names, opset: int | None = None) -> Any:
    """torch's ONNXProgram, with words for dynamic sizes and without the exporter's notes."""
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
        if value.shape is not None and names:
            sizes = [
                x if isinstance(x, int) else SYMBOL.sub(lambda s: names.get(s[0], s[0]), str(x)) for x in value.shape
            ]
            value.shape = type(value.shape)(sizes)
        value.metadata_props.clear()  # notes of the exporter, a tenth of the file
    for node in graph.all_nodes():
        node.metadata_props.clear()
    return onnx


def write_onnx(
    program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names, opset: int | None = None
) -> None:
    onnx = as_onnx(program, inputs, outputs, opset)
    onnx.model.metadata_props[KEY] = facts
    onnx.save(str(path))  # weights of more than 2 GB go to a second file


def open_onnx(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
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


# OpenVINO


@cache
def openvino_core() -> Any:
    """The only Core of this process: each sets a stack for signals, and when closed may restore one that is freed."""
    import openvino

    return openvino.Core()


def write_openvino(program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names) -> None:
    import openvino

    # By way of ONNX: files from torch's programs are a tenth slower.
    model = openvino_core().read_model(as_onnx(program, inputs, outputs).model_proto.SerializeToString())
    model.set_rt_info(facts, KEY)
    openvino.save_model(model, path, compress_to_fp16=False)


def open_openvino(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
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


# torch


def write_pt2(program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names) -> None:
    torch.export.save(program, path, extra_files={KEY: facts})


def open_pt2(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    text, program = pt2.read(path)
    if threads:
        torch.set_num_threads(threads)
    return text, torch.no_grad()(program)


def check_compiler() -> None:
    """Raises ImportError if there is no C++ compiler, which AOTInductor needs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    missing = (
        "AOTInductor needs a C++ compiler, but none was found: install g++ or clang, or name one in the environment"
        " variable CXX."
    )
    with explained(missing, InvalidCxxCompiler, ImportError):
        get_cpp_compiler()


def write_compiled(program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names) -> None:
    """Machine code for processors like this one, by AOTInductor."""
    with silent_stderr():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": {KEY: facts}}
        )


def open_compiled(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
    """Opens a file that was just written: this runs the code in it."""
    model = torch._inductor.aoti_load_package(str(path))
    return model.get_metadata().get(KEY), torch.no_grad()(lambda images: tuple(model(images)))


# ExecuTorch


def write_executorch(program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names) -> None:
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


def open_executorch(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session]:
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


# Core ML. Files are written and checked on any system and run on macOS alone. Their input is an image of Core ML, and
# they compute in float16, because Apple's Neural Engine computes in nothing else.


def write_coreml(program: ExportedProgram, facts: str, path: Path, inputs: Names, outputs: Names) -> None:
    """Writes a program on float32 images (1, channels, height, width) of 0..255, and checks what is written."""
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if tensor.is_floating_point() and not torch.equal(tensor.isfinite(), tensor.half().isfinite()):
            raise ValueError(f"the weight {name} is too large for float16")
    with silent_stderr():
        import coremltools as ct

        images: Tensor = program.example_inputs[0][0]
        layout = ct.colorlayout.RGB if images.shape[1] == 3 else ct.colorlayout.GRAYSCALE
        model = ct.convert(
            program.run_decompositions(DECOMPOSITIONS),
            inputs=[ct.ImageType("images", shape=tuple(images.shape), color_layout=layout)],
            outputs=[ct.TensorType(name, dtype=np.float32) for name in outputs],
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
        model.user_defined_metadata[KEY] = facts
        model.save(str(path))
        (path / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)  # of use to coremltools' debugger alone
        written = ct.models.MLModel(str(path), skip_model_load=True)
        if written.get_spec() != model.get_spec():
            raise ValueError("coremltools reads other operators from the file than it wrote")


DECOMPOSITIONS: dict[OpOverload, Callable[..., Tensor]] = {  # of what coremltools does not know
    torch.ops.aten.addcmul.default: lambda x, first, second, *, value=1: x + value * first * second,
    torch.ops.aten.alias.default: lambda x: x,
}


def open_coreml(path: Path, threads: int | None, precision: str) -> tuple[str | None, Session | None]:
    runs = system() == "Darwin"
    with silent_stderr():
        import coremltools as ct

        model = ct.models.MLModel(str(path), skip_model_load=not runs)
    names = [output.name for output in model.get_spec().description.output]

    def run(images: Tensor) -> tuple[Tensor, ...]:
        pixels = images[0].movedim(0, -1).numpy()
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        values: dict[str, Any] = model.predict({"images": image})
        return tuple(torch.from_numpy(values[name]) for name in names)

    return model.user_defined_metadata.get(KEY), run if runs else None

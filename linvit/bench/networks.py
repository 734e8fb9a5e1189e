"""Building the networks of a benchmark from a name, an image size, and a variant such as fused+bf16."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from linvit.bench.clock import Call, TensorsCall
from linvit.bench.machine import MEBIBYTE, peak_of
from linvit.bench.reference import reference_model
from linvit.bench.rows import Row
from linvit.data.dense.label_maps import ADE20K_CLASSES
from linvit.deploy.facts import SequenceFacts
from linvit.deploy.formats import FORMATS, opened, session_of
from linvit.deploy.graph import exported
from linvit.deploy.int8 import need_int8, quantized
from linvit.deploy.runtimes import Session
from linvit.errors import SettingError
from linvit.files import explained
from linvit.fusion import fuse
from linvit.kernels import cpu, record
from linvit.kernels.support import machine_obstacle
from linvit.models.dense.frameworks import build_dense
from linvit.ranges import check_names

PLAIN = "plain"
COMPILED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "autotuned": {"mode": "max-autotune-no-cudagraphs"},
    "graphed": {"mode": "reduce-overhead"},  # for steps of training, which are not timed in a CUDA graph
    "frozen": {"options": {"freezing": True}},
}
"""Parts that are `torch.compile`, with its arguments."""
RUNTIMES = {"onnxruntime": ".onnx", "openvino": ".xml", "executorch": ".pte"}
"""Parts that are another runtime, with the suffix of its files."""
PARTS = (
    *("reference", "fused", "channels_last", "bf16", "compiled", "autotuned", "frozen", "cpp", "triton"),
    *(*RUNTIMES, "int8"),
)
"""Changes to the plain eager float32 network, joined by "+" in a variant such as "fused+bf16".

reference: the attentions in the released order. fused: `linvit.fuse`, after timm's own reparametrization.
channels_last, bf16: weights and image. compiled: `torch.compile`; autotuned: the same with its choice of kernels timed;
frozen: the same with its weights as constants.
cpp, triton: linear attention by `linvit.kernels.cpu`, or by `linvit.kernels` on a GPU.
onnxruntime, openvino, executorch: the folded and exported network through that runtime; with int8, its layers with
weights in 8 bits.
"""
CLASSES = 1000
PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One network, variant and size (height, width) of the images; with a framework, a segmentor on that network."""

    name: str
    variant: str
    size: tuple[int, int]
    batch: int
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    framework: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant} at {self.size[0]} × {self.size[1]}, batch {self.batch}"

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {"int8": torch.int8, "bf16": torch.bfloat16}
        return next((dtype for name, dtype in dtypes.items() if name in self.variant.split("+")), torch.float32)


def row_of(case: Case, network: nn.Module | None, work: str = "forward", skipped: str | None = None) -> Row:
    """The row of a case before anything is measured, with the pattern of its network."""
    dtype = str(case.dtype).removeprefix("torch.")
    row = Row(case.name, case.variant, dtype, case.batch, case.threads, work, size=case.size, skipped=skipped)
    modules = () if network is None else network.modules()
    row.pattern = next((str(module.pattern) for module in modules if hasattr(module, "pattern")), None)
    return row


def parts_of(variant: str, known: Sequence[str] = PARTS) -> tuple[str, ...]:
    """The parts of a variant; none for "plain"."""
    parts = () if variant == PLAIN else tuple(variant.split("+"))
    check_names("variant, or part of one,", parts, [PLAIN, *known])
    return parts


def create(name: str, size: tuple[int, int], framework: str | None = None, **options: Any) -> nn.Module:
    """A network for images of this size, without published weights; networks of a fixed size are created for it.

    With a framework, a segmentor on it, for as many classes as ADE20K has.
    """
    if framework:
        return build_dense(framework, name, ADE20K_CLASSES, **options)
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        options["img_size"] = size
    with explained(lambda reason: f"{name} cannot be built for {size[0]} × {size[1]} px: {reason}", AssertionError):
        return timm.create_model(name, num_classes=CLASSES, **options)


def randomised(network: nn.Module, seed: int = 1) -> nn.Module:
    """The network in eval mode, every parameter and statistic random, so that any missing part changes the output.

    Fresh networks hide mistakes: norms of weight 1, and layer scales of 1e-6 that leave blocks without effect.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    with torch.no_grad():
        for module in network.modules():
            for name, parameter in module.named_parameters(recurse=False):
                scales = isinstance(module, nn.LayerNorm | nn.BatchNorm2d) and name == "weight"
                if scales or name.startswith("gamma"):
                    parameter.copy_(1 + 0.3 * normal(parameter))
                elif parameter.ndim > 1:
                    parameter.copy_(normal(parameter) / parameter[0].numel() ** 0.5)
                else:
                    parameter.copy_(0.3 * normal(parameter))
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                module.running_mean.copy_(0.5 * normal(module.running_mean))
            if isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
                module.running_var.copy_(0.5 + normal(module.running_var) ** 2)
    return network.eval()


def images(case: Case) -> Tensor:
    """The same images for every network, from the seed: (batch, 3, height, width), float32."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.batch, 3, *case.size, generator=generator).to(case.device)


def variant_call(network: nn.Module, x: Tensor, case: Case) -> TensorsCall:
    """A function without arguments that returns (logits,); the given network is not changed."""
    parts = parts_of(case.variant)
    network = deepcopy(network)
    if "reference" in parts:
        network = reference_model(network)
    if "fused" in parts:
        network = fuse(reparameterize_model(network).eval(), for_device="cuda" if x.is_cuda else "cpu")
    if "channels_last" in parts:
        network, x = network.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    if "bf16" in parts:
        network, x = network.bfloat16(), x.bfloat16()
    for runtime, suffix in RUNTIMES.items():
        if runtime in parts:
            return runtime_call(suffix, reparameterize_model(network).eval(), x, case.threads, "int8" in parts)
    if "int8" in parts:
        raise ValueError(f"int8 is for exported networks: write it with a runtime, such as {next(iter(RUNTIMES))}+int8")
    function: Callable[[Tensor], Tensor] = network
    if COMPILED.keys() & parts:
        function = compiled(network, parts)
    if "cpp" in parts:
        cpu.build()
        return lambda: (function(x),)
    if "triton" in parts:
        check_triton(x.device, x.dtype)
    return cpu.aside()(record.trusted("triton" in parts)(lambda: (function(x),)))


def compiled(network: nn.Module, parts: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """The network by `torch.compile`, as one of the parts says."""
    how, *others = (name for name in parts if name in COMPILED)
    if others:
        raise ValueError(f"a variant has {how} and {others[0]}, expected one of {', '.join(COMPILED)}: leave one out")
    return torch.compile(network, **COMPILED[how])


def check_triton(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if the Triton kernels cannot run on such tensors; the message says why."""
    reason = machine_obstacle(device, dtype)
    if reason is not None:
        raise ValueError(f"the kernels cannot run: {reason}")


def build_call(case: Case) -> Call:
    """The variant of a fresh network, for a separate process."""
    with torch.inference_mode():
        network = randomised(create(case.name, case.size, case.framework)).to(case.device)
        return torch.inference_mode()(variant_call(network, images(case), case))


@dataclass(frozen=True)
class FileCall:
    """A call of an exported file in its runtime on the CPU, with the same images every time.

    session: of the file. images: what it reads. folder: if it is temporary, kept as long as the call. int8: whether its
    layers are in 8 bits.
    """

    path: Path
    session: Session
    images: Tensor
    threads: int
    precision: str = "float32"
    int8: bool = False
    folder: TemporaryDirectory[str] | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        return self.session(self.images)

    @property
    def mebibytes(self) -> float:
        """Size of the file, with OpenVINO's weights beside it."""
        files = (self.path, self.path.with_suffix(".bin")) if self.path.suffix == ".xml" else (self.path,)
        return sum(file.stat().st_size for file in files) / MEBIBYTE

    def peak(self) -> float | None:
        """Peak in MiB of opening the file and calling it, weights included; see peak_of."""
        return peak_of(_opening, self.path, self.images, self.threads, self.precision)


def _opening(path: Path, images: Tensor, threads: int, precision: str) -> Call:
    def open_and_call() -> object:
        session = FORMATS[path.suffix].open(path, threads, precision)[1]
        assert session is not None  # it has been opened before
        return session(images)

    return open_and_call


def runtime_call(suffix: str, network: nn.Module, x: Tensor, threads: int, int8: bool = False) -> FileCall:
    """The network, folded and written to a file of that format, in its runtime.

    x: images; the runtime computes in their dtype. int8: whether layers with weights are in 8 bits, calibrated on x.
    """
    runtime = FORMATS[suffix]
    runtime.need()
    if int8:
        need_int8(suffix)
    precision = PRECISIONS.get(x.dtype)
    if precision is None or precision not in runtime.precisions:
        names = " and ".join(runtime.precisions)
        raise ValueError(f"{runtime.name} computes in {names} here, not in {precision or x.dtype}")
    images = x.float().contiguous()
    folder = TemporaryDirectory()
    path = Path(folder.name) / f"network{suffix}"
    with torch.inference_mode(False), torch.no_grad():
        program = exported(fuse(deepcopy(network).float(), "graph"), images.clone())
        program = quantized(program, images, suffix, dynamic=False) if int8 else program
        session = session_of(runtime, program, path, threads=threads, precision=precision)
    assert session is not None  # the runtimes of RUNTIMES run on every system
    return FileCall(path, session, images, threads, precision, int8, folder)


def file_call(path: Path, x: Tensor, threads: int) -> FileCall:
    """An exported file of the user's, in its runtime, with images as in x, which are normalized, as pixels."""
    facts, session = opened(path, threads)
    if isinstance(facts, SequenceFacts):
        raise ValueError(f"{path} reads {facts.inputs[0]}, expected a file that reads images: give one.")
    facts.check(x.shape, path)
    if len(x) > 1 and not facts.dynamic:
        raise SettingError(f"{path} reads one image, but the batch has {len(x)}: leave `batches` out.")
    pixels = (x * 64 + 128).clamp(0, 255).to(torch.uint8)
    return FileCall(path, session, pixels, threads, int8=facts.calibrated > 0)

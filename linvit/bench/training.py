"""`linvit bench train`: a training step (forward, loss, backward, AdamW) per variant, and its effect on the loss."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.bench import memory, rows
from linvit.bench.clock import Call
from linvit.bench.exactness import check
from linvit.bench.networks import (
    BYTES_PER_PIXEL,
    CLASSES,
    COMPILED,
    OURS,
    Case,
    check_triton,
    compiled,
    create,
    parts_of,
    randomised,
    row_of,
)
from linvit.bench.reference import reference_model
from linvit.bench.rows import Progress, Report, Timed
from linvit.kernels import cpu, record
from linvit.models.by_name import check_model, is_ours
from linvit.ranges import Amount, Count, Range

PARTS = (
    "reference",
    "channels_last",
    "bf16",
    "compiled",
    "autotuned",
    "graphed",
    "checkpointing",
    "fused_adamw",
    "cpp",
    "triton",
)
"""Changes to the plain eager float32 step, see linvit.bench.networks; bf16 is autocast here.

fused_adamw: the optimizer's step in one pass, `optimizer.options.fused=true` in a recipe.
"""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-1}
"""Largest relative L2 error of loss and gradients in the first step, against the plain step in the same weights.

Gradients pass a network twice, and batch norms over few images amplify rounding: ten times the usual error.
"""
TIMED_RATE, CURVE_RATE, DECAY = 1e-6, 3e-4, 0.05
BATCHES = 4  # that the loss curve repeats, so that there is something to learn
NOISE_FACTOR = 3.0  # a curve agrees if it deviates by at most this many times the curve of the dtype's noise


@dataclass(frozen=True)
class Options(rows.Options):
    """Options of `linvit bench train`; there are no loss curves if curve_steps is 0."""

    names: Sequence[str] = OURS
    variants: Sequence[str] = ("plain", "reference", "channels_last", "bf16", "checkpointing")
    size: tuple[Count, Count] = (224, 224)
    batch: Annotated[int, Range(2, because="batch norms need two")] = 4
    rounds: Count = 3
    curve_steps: Amount = 0
    curve_size: tuple[Count, Count] = (64, 64)
    curve_batch: Annotated[int, Range(2, because="batch norms need two")] = 8

    def __post_init__(self) -> None:
        for name in self.names:
            check_model(name)
        for variant in self.variants:
            parts_of(variant, PARTS)

    def least_bytes(self) -> int:
        """The bytes of the images, of a network's first maps and of their gradients, a lower bound."""
        of_curves = self.curve_batch * math.prod(self.curve_size) if self.curve_steps else 0
        return 2 * BYTES_PER_PIXEL * max(self.batch * math.prod(self.size), of_curves)


@dataclass
class Step:
    """A network, its optimizer, and one step of training."""

    case: Case
    network: nn.Module
    forward: Callable[[Tensor], Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    rate: float = TIMED_RATE

    def __post_init__(self) -> None:
        parts = parts_of(self.case.variant, PARTS)
        if "reference" in parts:
            self.network = reference_model(self.network)
        if "channels_last" in parts:
            self.network = self.network.to(memory_format=torch.channels_last)
        if "checkpointing" in parts:
            cast(Any, self.network).set_grad_checkpointing(True)
        self.forward = compiled(self.network, parts) if COMPILED.keys() & parts else self.network
        if "cpp" in parts:
            cpu.build()
        if "triton" in parts:
            check_triton(torch.device(self.case.device), torch.bfloat16 if "bf16" in parts else torch.float32)
        fused = "fused_adamw" in parts or None
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.rate, weight_decay=DECAY, fused=fused)

    def gradients(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss; gradients are left in the network."""
        parts = parts_of(self.case.variant, PARTS)
        if "channels_last" in parts:
            x = x.to(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        kernel = nullcontext() if "cpp" in parts else cpu.aside()
        # around the backward pass too, if checkpointing runs the forward pass again
        with kernel, record.trusted("triton" in parts):
            with torch.autocast(self.case.device, torch.bfloat16, enabled="bf16" in parts):
                logits = self.forward(x)
            loss = F.cross_entropy(logits.float(), target)
            loss.backward()
        return loss.detach()

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        loss = self.gradients(x, target)
        self.optimizer.step()
        return loss


def network_for(name: str, size: tuple[int, int], seed: int) -> nn.Module:
    """A network in train mode without stochastic depth, with which no two curves agree."""
    torch.manual_seed(seed)
    return (create(name, size, drop_path_rate=0.0) if is_ours(name) else create(name, size)).train()


def data(batch: int, size: tuple[int, int], seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, *size, generator=generator)
    return x.to(device), torch.randint(CLASSES, (batch,), generator=generator).to(device)


def measure(options: Options, report: Report, progress: Progress) -> None:
    """Checks loss and gradients of the first step, then times all variants of each network, then draws loss curves.

    Raises:
        WrongResultError: before anything of a network is timed, if a variant is wrong.
    """
    for name in options.names:
        progress.group(f"{name}, {options.size[0]} × {options.size[1]} px, batch {options.batch}", options.rounds)
        _measure_one(name, options, report, progress)
    if options.curve_steps:
        for name in options.names:
            progress.group(f"loss curves of {name}", len(options.variants))
            report.findings.setdefault("curves", {})[name] = loss_curves(name, options, progress)


def cases(name: str, options: Options) -> list[Case]:
    """All variants of one network; a released order exists for ours alone."""
    return [
        Case(name, variant, options.size, options.batch, options.device, options.threads, options.seed)
        for variant in options.variants
        if is_ours(name) or "reference" not in parts_of(variant, PARTS)
    ]


def _measure_one(name: str, options: Options, report: Report, progress: Progress) -> None:
    network = randomised(network_for(name, options.size, options.seed)).train().to(options.device)
    batch = data(options.batch, options.size, options.seed, options.device)
    plain_case = Case(name, "plain", options.size, options.batch, options.device)
    expected = _results(Step(plain_case, deepcopy(network)), batch)
    calls: dict[str, Timed] = {}
    for case in cases(name, options):
        progress.say(f"checking {case.label}")
        row = row_of(case, network, "step")
        report.rows.append(row)
        try:
            step = Step(case, deepcopy(network))
        except ValueError as error:
            row.skipped = str(error)
            continue
        label = f"the training step of {case.label}"
        row.error = check(label, _results(step, batch), expected, TOLERANCES[case.dtype])
        call = partial(step, *batch)
        if options.memory:
            progress.say(f"memory of {case.label}")
            row.peak_mib = memory.peak(options.device, options.threads, call, build_step, case)
        plain, released = (replace(case, variant=variant).label for variant in ("plain", "reference"))
        calls[case.label] = Timed(row, call, plain, {"reference": released})
    rows.time_all(calls, options, progress, graphs=False)  # the optimizer's step is not captured


def _results(step: Step, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The loss, and all gradients as one vector: single biases have gradients that are nothing but rounding."""
    loss = step.gradients(*batch)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in step.network.parameters()]
    return [loss, torch.cat([x.flatten() for x in gradients])]


def build_step(case: Case) -> Call:
    """One step of a fresh network, for a separate process."""
    step = Step(case, network_for(case.name, case.size, case.seed).to(case.device))
    batch = data(case.batch, case.size, case.seed, case.device)
    return lambda: step(*batch)


def loss_curves(name: str, options: Options, progress: Progress) -> dict[str, dict[str, object]]:
    """Loss over the steps of each variant, how far it is from the plain curve, and whether that is the dtype's noise.

    Keys of a variant: losses; deviation, the largest difference from the plain curve; noise, the same of a plain curve
    whose weights and images were moved by the dtype's rounding before every step; agrees, whether deviation is at most
    NOISE_FACTOR · noise.
    """
    plain = Case(name, "plain", options.curve_size, options.curve_batch, options.device, options.threads, options.seed)
    expected = _losses(plain, options.curve_steps)
    noises: dict[torch.dtype, float] = {}
    curves: dict[str, dict[str, object]] = {}
    for case in cases(name, options):
        progress.say(f"{options.curve_steps} steps of {name} {case.variant}")
        if case.dtype not in noises:
            noisy = _losses(plain, options.curve_steps, torch.finfo(case.dtype).eps)
            least = 10 * torch.finfo(torch.float32).eps * max(expected)  # the loss itself is rounded
            noises[case.dtype] = max(_deviation(noisy, expected), least)
        losses = _losses(replace(plain, variant=case.variant), options.curve_steps)
        deviation, noise = _deviation(losses, expected), noises[case.dtype]
        curves[case.variant] = {
            "losses": losses,
            "deviation": deviation,
            "noise": noise,
            "agrees": deviation <= NOISE_FACTOR * noise,
        }
        progress.advance()
    return curves


def _losses(case: Case, steps: int, noise: float = 0.0) -> list[float]:
    """Losses of this many steps from the default initialization; noise: relative change of the weights per step."""
    step = Step(case, network_for(case.name, case.size, case.seed).to(case.device), CURVE_RATE)
    batches = [data(case.batch, case.size, case.seed + number, case.device) for number in range(BATCHES)]
    generator = torch.Generator().manual_seed(case.seed)
    losses = []
    for x, target in itertools.islice(itertools.cycle(batches), steps):
        if noise:
            with torch.no_grad():
                for moved in (x, *step.network.parameters()):
                    moved.mul_(1 + noise * (torch.rand(moved.shape, generator=generator) - 0.5).to(moved))
        losses.append(step(x, target).item())
    return losses


def _deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))

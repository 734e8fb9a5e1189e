"""`linvit bench train`: a training step (forward, loss, backward, AdamW) per variant, and its effect on the loss."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.bench.clock import Call
from linvit.bench.machine import peak
from linvit.bench.networks import CLASSES, COMPILED, Case, check_triton, compiled, create, parts_of, randomised, row_of
from linvit.bench.options import TrainingOptions
from linvit.bench.reference import reference_model
from linvit.bench.rows import Progress, Report, Trial, measure_groups
from linvit.kernels import cpu, record
from linvit.models.by_name import check_model, is_ours

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


def check_options(options: TrainingOptions) -> None:
    """Raises ValueError for names that do not exist."""
    for name in options.names:
        check_model(name)
    for variant in options.variants:
        parts_of(variant, PARTS)


@dataclass
class Step:
    """A network, its optimizer, a batch of images and classes, and one step of training with it, which is the call."""

    case: Case
    network: nn.Module
    batch: tuple[Tensor, Tensor]
    rate: float = TIMED_RATE
    parts: tuple[str, ...] = field(init=False)
    forward: Callable[[Tensor], Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.parts = parts_of(self.case.variant, PARTS)
        if "reference" in self.parts:
            self.network = reference_model(self.network)
        if "channels_last" in self.parts:
            self.network = self.network.to(memory_format=torch.channels_last)
        if "checkpointing" in self.parts:
            cast(Any, self.network).set_grad_checkpointing(True)
        self.forward = compiled(self.network, self.parts) if COMPILED.keys() & self.parts else self.network
        if "cpp" in self.parts:
            cpu.build()
        if "triton" in self.parts:
            check_triton(torch.device(self.case.device), torch.bfloat16 if "bf16" in self.parts else torch.float32)
        fused = "fused_adamw" in self.parts or None
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.rate, weight_decay=DECAY, fused=fused)

    def gradients(self) -> Tensor:
        """The loss; gradients are left in the network."""
        x, target = self.batch
        if "channels_last" in self.parts:
            x = x.to(memory_format=torch.channels_last)
        self.optimizer.zero_grad(set_to_none=True)
        kernel = nullcontext() if "cpp" in self.parts else cpu.aside()
        # around the backward pass too, if checkpointing runs the forward pass again
        with kernel, record.trusted("triton" in self.parts):
            with torch.autocast(self.case.device, torch.bfloat16, enabled="bf16" in self.parts):
                logits = self.forward(x)
            loss = F.cross_entropy(logits.float(), target)
            loss.backward()
        return loss.detach()

    def __call__(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def results(self) -> list[Tensor]:
        """The loss, and all gradients as one vector: single biases have gradients that are nothing but rounding."""
        loss = self.gradients()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.network.parameters()]
        return [loss, torch.cat([x.flatten() for x in gradients])]


def network_for(name: str, size: tuple[int, int], seed: int) -> nn.Module:
    """A network in train mode without stochastic depth, with which no two curves agree."""
    torch.manual_seed(seed)
    return (create(name, size, drop_path_rate=0.0) if is_ours(name) else create(name, size)).train()


def data(batch: int, size: tuple[int, int], seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, *size, generator=generator)
    return x.to(device), torch.randint(CLASSES, (batch,), generator=generator).to(device)


def measure(options: TrainingOptions, report: Report, progress: Progress) -> None:
    """Checks loss and gradients of the first step, then times all variants of each network, then draws loss curves."""
    where = f"{options.size[0]} × {options.size[1]} px, batch {options.batch}"
    groups = ((f"{name}, {where}", trials(name, options)) for name in options.names)
    measure_groups(groups, options, report, progress, graphs=False)  # the optimizer's step is not captured
    if options.curve_steps:
        for name in options.names:
            progress.group(f"loss curves of {name}", len(options.variants))
            report.findings.setdefault("curves", {})[name] = loss_curves(name, options, progress)


def cases(name: str, options: TrainingOptions, size: tuple[int, int], batch: int) -> list[Case]:
    """All variants of one network; a released order exists for ours alone."""
    return [
        Case(name, variant, size, batch, options.device, options.threads, options.seed)
        for variant in options.variants
        if is_ours(name) or "reference" not in parts_of(variant, PARTS)
    ]


def trials(name: str, options: TrainingOptions) -> Iterator[Trial]:
    """The steps of all variants of one network, each checked against the plain step in the same weights."""
    network = randomised(network_for(name, options.size, options.seed)).train().to(options.device)
    batch = data(options.batch, options.size, options.seed, options.device)
    plain_case = Case(name, "plain", options.size, options.batch, options.device)
    expected = Step(plain_case, deepcopy(network), batch).results()
    for case in cases(name, options, options.size, options.batch):
        plain, released = (replace(case, variant=variant).label for variant in ("plain", "reference"))
        yield Trial(
            row_of(case, network, "step"),
            case.label,
            make=partial(_step, case, network, batch),
            expected=lambda: expected,
            tolerance=TOLERANCES[case.dtype],
            results=Step.results,
            excused=(ValueError,),
            peak=partial(peak, build_step, case, options.device, options.threads),
            base=plain,
            rivals={"reference": released},
        )


def _step(case: Case, network: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    return Step(case, deepcopy(network), batch)


def build_step(case: Case) -> Call:
    """One step of a fresh network, for a separate process."""
    network = network_for(case.name, case.size, case.seed).to(case.device)
    return Step(case, network, data(case.batch, case.size, case.seed, case.device))


def loss_curves(name: str, options: TrainingOptions, progress: Progress) -> dict[str, dict[str, object]]:
    """Loss over the steps of each variant, how far it is from the plain curve, and whether that is the dtype's noise.

    Keys of a variant: losses; deviation, the largest difference from the plain curve; noise, the same of a plain curve
    whose weights and images were moved by the dtype's rounding before every step; agrees, whether deviation is at most
    NOISE_FACTOR · noise.
    """
    steps = options.curve_steps
    variants = cases(name, options, options.curve_size, options.curve_batch)
    plain = Case(name, "plain", options.curve_size, options.curve_batch, options.device, options.threads, options.seed)
    expected = _losses(plain, steps)
    noises: dict[torch.dtype, float] = {}
    curves: dict[str, dict[str, object]] = {}
    for case in variants:
        progress.say(f"{steps} steps of {name} {case.variant}")
        if case.dtype not in noises:
            noisy = _losses(plain, steps, torch.finfo(case.dtype).eps)
            least = 10 * torch.finfo(torch.float32).eps * max(expected)  # the loss itself is rounded
            noises[case.dtype] = max(_deviation(noisy, expected), least)
        losses = _losses(case, steps)
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
    batches = [data(case.batch, case.size, case.seed + number, case.device) for number in range(BATCHES)]
    network = network_for(case.name, case.size, case.seed).to(case.device)
    step = Step(case, network, batches[0], CURVE_RATE)
    generator = torch.Generator().manual_seed(case.seed)
    losses = []
    for batch in itertools.islice(itertools.cycle(batches), steps):
        step.batch = batch
        if noise:
            with torch.no_grad():
                for moved in (batch[0], *step.network.parameters()):
                    moved.mul_(1 + noise * (torch.rand(moved.shape, generator=generator) - 0.5).to(moved))
        losses.append(step().item())
    return losses


def _deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))

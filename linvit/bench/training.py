"""`linvit bench train`: a training step (forward, loss, backward, AdamW) per variant."""

from collections.abc import Callable, Iterator
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
    "recomputing",
    "fused_adamw",
    "cpp",
    "triton",
)
"""Changes to the plain eager float32 step, see linvit.bench.networks; bf16 is autocast here.

checkpointing, recomputing: `task.recompute` blocks and cheap in a recipe. fused_adamw: the optimizer's step in one
pass, `optimizer.options.fused=true` in a recipe.
"""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-1}
"""Largest relative L2 error of loss and gradients in the first step, against the plain step in the same weights.

Gradients pass a network twice, and batch norms over few images amplify rounding: ten times the usual error.
"""
TIMED_RATE, DECAY = 1e-6, 0.05


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
        if "recomputing" in self.parts:
            cast(Any, self.network).set_recomputing("cheap")
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
    """Checks loss and gradients of the first step, then times all variants of each network."""
    where = f"{options.size[0]} × {options.size[1]} px, batch {options.batch}"
    groups = ((f"{name}, {where}", trials(name, options)) for name in options.names)
    measure_groups(groups, options, report, progress, graphs=False)  # the optimizer's step is not captured


def cases(name: str, options: TrainingOptions) -> list[Case]:
    """All variants of one network; a released order exists for ours alone."""
    return [
        Case(name, variant, options.size, options.batch, options.device, options.threads, options.seed)
        for variant in options.variants
        if is_ours(name) or "reference" not in parts_of(variant, PARTS)
    ]


def trials(name: str, options: TrainingOptions) -> Iterator[Trial]:
    """The steps of all variants of one network, each checked against the plain step in the same weights."""
    network = randomised(network_for(name, options.size, options.seed)).train().to(options.device)
    batch = data(options.batch, options.size, options.seed, options.device)
    plain_case = Case(name, "plain", options.size, options.batch, options.device)
    expected = Step(plain_case, deepcopy(network), batch).results()
    for case in cases(name, options):
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

"""Whether the losses of training steps agree with the plain float32 step, over the first steps of a training."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

from linvit.analysis.figures import colours_of, subplots
from linvit.bench import training
from linvit.bench.networks import Case
from linvit.bench.options import Batch, Size, TrainingOptions
from linvit.bench.page import DASHES, FONT, LINES, OF_NETWORKS
from linvit.bench.rows import Progress, Report
from linvit.bench.training import Step, cases, data, network_for
from linvit.ranges import Count

COLUMNS = OF_NETWORKS
RATE = 3e-4
BATCHES = 4  # that a loss curve repeats, so that there is something to learn
NOISE_FACTOR = 3.0  # a curve agrees if it deviates by at most this many times the curve of the dtype's noise


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Options of `linvit bench train`, and the steps of a loss curve."""

    names: Sequence[str] = ("ravlt_nano", "mavit_nano", "care_nano")
    size: Size = (64, 64)
    batch: Batch = 8
    steps: Count = 50

    def __post_init__(self) -> None:
        training.check_options(self)


def measure(options: Options, report: Report, progress: Progress) -> None:
    """Times steps as `linvit bench train` does, then computes the loss curves."""
    training.measure(options, report, progress)
    curves, notes = report.findings.setdefault("curves", {}), report.findings.setdefault("notes", [])
    for name in options.names:
        progress.group(f"loss curves of {name}", len(options.variants))
        curves[name] = loss_curves(name, options, progress)
        for variant, curve in curves[name].items():
            agreement = "agrees" if curve["agrees"] else "DOES NOT AGREE"
            notes.append(
                f"loss curve of {name} {variant}: {agreement} with plain, at most {curve['deviation']:.1e} off in "
                f"{len(curve['losses'])} steps (noise of its dtype: {curve['noise']:.1e})"
            )


def loss_curves(name: str, options: Options, progress: Progress) -> dict[str, dict[str, Any]]:
    """Loss over the steps of each variant, how far it is from the plain curve, and whether that is the dtype's noise.

    Keys of a variant: losses; deviation, the largest difference from the plain curve; noise, the same of a plain curve
    whose weights and images were moved by the dtype's rounding before every step; agrees, whether deviation is at most
    NOISE_FACTOR · noise.
    """
    steps = options.steps
    plain = Case(name, "plain", options.size, options.batch, options.device, options.threads, options.seed)
    expected = _losses(plain, steps)
    noises: dict[torch.dtype, float] = {}
    curves: dict[str, dict[str, Any]] = {}
    for case in cases(name, options):
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
    step = Step(case, network, batches[0], RATE)
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


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Name and figure of the loss curves of each network."""
    for name, variants in report.findings.get("curves", {}).items():
        yield f"loss_{name}", losses(name, variants)


def losses(name: str, variants: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss over steps, and each variant's distance from the plain curve next to the noise of its dtype."""
    figure, (left, right) = subplots((11, 4), 1, 2)
    plain = variants["plain"]["losses"] if "plain" in variants else next(iter(variants.values()))["losses"]
    noises: dict[float, str] = {}
    colours = colours_of(list(variants))
    for index, (variant, curve) in enumerate(variants.items()):
        style = {"color": colours[variant], "label": variant, "linestyle": LINES[index % len(LINES)]}
        steps = range(1, 1 + len(curve["losses"]))
        left.plot(steps, curve["losses"], **style)
        off = [abs(loss - other) for loss, other in zip(curve["losses"], plain, strict=True)]
        if any(off):
            right.plot(steps, [value or float("nan") for value in off], **style)
        noises.setdefault(curve["noise"], "bfloat16" if "bf16" in variant else "float32")
    for noise, dtype in noises.items():
        right.axhline(noise, color="#BBBBBB", linewidth=1)
        right.annotate(
            f"noise of {dtype}", (1, noise), (0, 3), textcoords="offset points", fontsize=FONT, color="#777777"
        )
    left.set(xlabel="step", ylabel="loss", title=name)
    right.set(xlabel="step", ylabel="distance from the plain curve", yscale="log")
    left.legend(frameon=False, fontsize=FONT, **DASHES)
    return figure

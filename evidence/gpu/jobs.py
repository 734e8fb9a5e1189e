"""The queue: jobs in the order in which they decide most, each a list of cases that it measures."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "rows"
"""What has been measured: JOB.jsonl for each job."""
Results = dict[str, Any]
"""What is measured. cells: rows of the tables, by heading; those with equal headings share a table."""


@dataclass(frozen=True)
class Case:
    """A row. code: folders and files that it measures, or a package of others. generate: makes slow code beforehand."""

    name: str
    measure: Callable[[], Results]
    code: tuple[str, ...]
    generate: Callable[[], object] | None = None


@dataclass(frozen=True)
class Job:
    """measured: module and function that give the cases. processes: that generate code at once, on the same card."""

    name: str
    minutes: int
    measured: str
    decides: str
    processes: int = 12

    def cases(self, toy: bool) -> list[Case]:
        """Those of the real sizes, or toy ones for a CPU."""
        module, _, function = self.measured.partition(":")
        listed: list[Case] = getattr(import_module(f"evidence.gpu.{module}"), function)(toy)
        return listed


QUEUE = (
    Job(
        "ceilings", 7, "ceilings:cases", "what the card gives: copies, launches, issue rate; where networks' time goes"
    ),
    Job("peers", 9, "networks:peers", "networks at their best, 224 px, 64 images and one"),
    Job("peers_large", 9, "networks:large_peers", "the same at 1,024 px, and for 256 images", processes=6),
    Job("training", 9, "networks:training", "steps of training; what of them `linvit train` reaches", processes=4),
    Job("sizes", 9, "networks:all_sizes", "all networks of the papers; hours for ImageNet; memory", processes=4),
    Job(
        "feeding",
        9,
        "feeding:cases",
        "images augmented on the GPU or the CPU; memory of steps that compute again",
        processes=4,
    ),
    Job("correctness", 5, "kernels:correctness", "may the kernels be used; do processes train together", processes=16),
    Job("sweep", 6, "kernels:forward_settings", "tile, warps, stages and splits of the forward kernels", processes=16),
    Job("small", 6, "operators:small", "from how many tokens on ours beat softmax attention; share of a copy's rate"),
    Job(
        "softmax", 2, "operators:short_softmax", "softmax attention of few tokens that rotates in its kernel, or before"
    ),
    Job(
        "depthwise",
        8,
        "depthwise:cases",
        "depthwise convolutions in our kernels, by torch or by inductor",
        processes=16,
    ),
    Job(
        "products",
        8,
        "products:cases",
        "layers with norm, activation and sums in our kernel, by torch or by inductor's templates",
        processes=16,
    ),
    Job("sweep_back", 8, "kernels:backward_settings", "the same of the backward kernels", processes=16),
    Job("referee", 9, "trainings:referee", "trainings: MHLA, ViT³, NaLaFormer, and blocks crossed with MALA and RALA"),
    Job("patterns", 9, "trainings:patterns", "trainings: which stages of a pyramid are linear, at 128 px; α, κ, gate"),
    Job("parts", 9, "trainings:parts", "trainings: CARE's parts, removed and at equal MACs, at a stable rate"),
    Job("scale", 9, "trainings:scale", "trainings: 256 tokens, heads of 64, 100 classes"),
    Job("long", 6, "long:cases", "linear attention aligned to softmax attention at 1,024, 4,096 and 16,384 tokens"),
    Job("published", 9, "published:cases", "trainings of published sizes at 224 px, by `linvit train` with its loader"),
    Job("flash_bla", 4, "operators:beside_flash_bla", "linear attention beside flash-bidirectional-linear-attention"),
)
"""Jobs of later work are added where they decide most."""
JOBS = {job.name: job for job in QUEUE}

"""What the page of evidence on linearizing says about MiniLM: the tables of the ledger, and time against length."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import linvit
from linvit import environment
from linvit.analysis.markdown import check_marks, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import short_commit

NAMES = {"copied": "not aligned", "align": "aligned", "short": "and distilled, short", "long": "and distilled, long"}
LENGTHS, ROUNDS = (512, 1024, 2048, 4096, 8192), 7
POSITIONS = 512
TIMED = ("sdpa", "linvit:linear", "linvit:rala", "linvit:mala")


def write_results(page: Path, ledger: Path) -> None:
    """Puts the tables of the ledger between the marks `minilm` and `minilm_plan` of a page."""
    lines = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if not line["run"].endswith(" plan")]
    commits = sorted({short_commit(line["commit"] or "unknown") for line in trained})
    machines = sorted({", ".join(line["machine"]) for line in trained})
    teacher = trained[0]["result"]["measures"]["teacher"]
    about = (
        f"The teacher finds {100 * teacher:.1f} %. In brackets: 95 % intervals over books. One seed; bfloat16 products;"
        f" one thread; {'; '.join(machines)}; torch {trained[0]['torch']}, commits {', '.join(commits)}."
    )
    replace_between_marks(page, f"{markdown_rows([*_rows(trained)], left=3)}\n\n*{about}*\n", *marks("minilm"))
    plans = [
        {"mechanism": line["run"].removesuffix(" plan"), **_numbered(line["result"]["measures"]["errors"])}
        for line in lines
        if line["run"].endswith(" plan")
    ]
    if plans:
        replace_between_marks(page, f"{markdown_rows(plans, left=1)}\n", *marks("minilm_plan"))


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    order, students = [*NAMES], dict.fromkeys(line["run"].split()[0] for line in lines)
    for student in students:
        stages = {stage: line for line in lines for name, stage in [line["run"].split()] if name == student}
        tokens, seconds = 0, 0.0
        for stage in sorted(stages, key=order.index):
            result = stages[stage]["result"]
            tokens, seconds = tokens + result["tokens"], seconds + result["seconds"]
            of = {key: 100 * value for key, value in result["measures"].items()}
            yield {
                "student": f"`{student}`",
                "blocks": result["pattern"],
                "stage": NAMES[stage],
                "tokens read": f"{tokens:,}",
                "minutes": f"{seconds / 60:.1f}",
                "found, %": f"{of['top1']:.1f}",
                "of the teacher's, %": f"{of['kept']:.1f} [{of['low']:.1f}, {of['high']:.1f}]",
                "same nearest, %": f"{of['agreement']:.1f}",
                "error": f"{of['error'] / 100:.3f}",
            }


def _numbered(errors: Sequence[float]) -> dict[str, str]:
    return {f"block {number}": f"{error:.3f}" for number, error in enumerate(errors, start=1)}


def write_times(encoder: Path, page: Path) -> None:
    """Measures a forward pass of one text by length, and puts the table between the marks `minilm_times` of a page.

    The learned positions are tiled: token i has that of i modulo 512. Weights decide no time, so the students are not
    trained. Medians of rounds in which all models take turns.
    """
    from transformers import AutoModel

    check_marks(page, *marks("minilm_times"))
    linvit.register_with_transformers()
    models = {name: AutoModel.from_pretrained(encoder, attn_implementation=name).eval() for name in TIMED}
    rows = []
    for length in LENGTHS:
        seconds = _seconds(models, length)
        row = {"tokens": f"{length:,}", "softmax, ms": f"{1000 * seconds['sdpa']:.0f}"}
        rows.append(row | {f"{name}, ×": f"{seconds['sdpa'] / seconds[name]:.2f}" for name in TIMED[1:]})
    machine = environment.describe(1, 1)
    about = f"×: times as fast as sdpa; float32, {torch.get_num_threads()} threads, median of {ROUNDS};"
    about += f" {', '.join(machine['devices'])}; commit {short_commit(machine['commit'] or 'unknown')}."
    replace_between_marks(page, f"{markdown_rows(rows, left=0)}\n\n*{about}*\n", *marks("minilm_times"))


@torch.no_grad()
def _seconds(models: dict[str, Any], length: int) -> dict[str, float]:
    some = next(iter(models.values()))
    ids = torch.randint(some.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    places = torch.arange(length)[None] % min(POSITIONS, some.config.max_position_embeddings)
    inputs = {"input_ids": ids, "position_ids": places, "token_type_ids": torch.zeros_like(ids)}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + ROUNDS):
        for name, model in models.items():
            started = time.perf_counter()
            model(**inputs)
            taken[name].append(time.perf_counter() - started)
    return {name: median(values[1:]) for name, values in taken.items()}

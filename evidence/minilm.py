"""MiniLM, a pretrained sentence encoder, with linear attention: aligned, distilled and measured on books.

Its six blocks of softmax attention become linear through `linvit.linearize`. `linvit.models.align` lets each learn what
it replaces; then all blocks learn the teacher's hidden states and embeddings, on short and on long pieces of text.
The measure is in `evidence.passages`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linvit
from evidence.minilm_page import write_results, write_times
from evidence.passages import Passages, chosen_books, embeddings, measures, passages_of, pieces_of, pooled, relative
from evidence.rows import EVIDENCE, Call
from evidence.steps import steps
from linvit.models import align
from linvit.models.hugging_face import attention_layers
from linvit.studies.comparison import Say
from linvit.studies.pool import Ledger

HELD_OUT, DEVELOPMENT, LEARNED = 20, 10, 60
"""Books of each part, in this order."""


@dataclass(frozen=True)
class Stage:
    """A part of the training: steps of `batch` pieces with so many tokens each; seed: of the order of the pieces."""

    steps: int
    batch: int
    tokens: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Study:
    """What is fixed before the runs. tokens: of a passage. passages: measured of each book, the first ones."""

    tokens: int = 512
    passages: int = 25
    development: int = 10
    align: Stage = Stage(steps=120, batch=3, tokens=512, rate=5e-3, seed=0)
    short: Stage = Stage(steps=200, batch=12, tokens=128, rate=5e-4, seed=1)
    long: Stage = Stage(steps=60, batch=4, tokens=512, rate=3e-4, seed=2)


@dataclass(frozen=True)
class Student:
    """pattern: as in `linvit.linearize`. new: whether queries, keys and values get random weights. stages: in turn."""

    name: str
    mechanism: str
    pattern: str = "L"
    new: bool = False
    stages: tuple[str, ...] = ("copied", "align", "short", "long")


SOFTMAX = 2
"""Blocks of a hybrid that stay softmax."""
STUDENTS = (
    Student("mala", "mala"),
    Student("linear", "linear"),
    Student("mala_hybrid", "mala", "plan", stages=("align", "short", "long")),
    Student("rala", "rala"),
    Student("mala_new", "mala", new=True, stages=("short", "long")),
)
"""In the order of the runs; "plan" is the pattern that the plan of the aligned student of the mechanism proposes."""


def batches(pieces: Tensor, steps: int, size: int, seed: int) -> list[dict[str, Tensor]]:
    """Pieces in a random order, each once before any comes again."""
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
    order = order.repeat(-(-steps * size // len(order)))[: steps * size].view(steps, size)
    return [{"input_ids": pieces[rows], "attention_mask": torch.ones_like(pieces[rows])} for rows in order]


def distillation(student: Any, teacher: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean relative error of the hidden states after each block, and that of the embeddings, added."""
    with torch.no_grad():
        wanted = teacher(**batch, output_hidden_states=True).hidden_states[1:]
    given = student(**batch, output_hidden_states=True).hidden_states[1:]
    states = [relative(x.float().flatten(0, 1), y.float().flatten(0, 1)) for x, y in zip(given, wanted, strict=True)]
    ends = [pooled(x[-1].float(), batch["attention_mask"]) for x in (given, wanted)]
    return torch.stack(states).mean() + relative(*ends)


def distill(student: Any, teacher: Any, given: Sequence[Mapping[str, Tensor]], rate: float) -> list[float]:
    """Trains all blocks of the student on what the teacher computes, in place; returns the loss of each step."""
    loss = partial(distillation, student, teacher)
    return [value for _, value in steps(student.encoder.parameters(), given, loss, len(given), rate)]


def damage(student: Any, teacher: Any, mechanism: str, passages: Passages, wanted: Tensor) -> list[float]:
    """The error of the embeddings when one block alone is linear, aligned as in the student, for each block."""
    blocks, errors = len(attention_layers(teacher)), []
    for block in range(blocks):
        mixed = linvit.linearize(teacher, mechanism, "".join("SL"[block == each] for each in range(blocks)))
        attention_layers(mixed)[block].load_state_dict(attention_layers(student)[block].state_dict())
        errors.append(relative(embeddings(mixed, passages), wanted).item())
    return errors


def planned(errors: Sequence[float]) -> str:
    """The pattern that leaves the blocks with the largest errors softmax."""
    worst = sorted(range(len(errors)), key=lambda block: -errors[block])[:SOFTMAX]
    return "".join("S" if block in worst else "L" for block in range(len(errors)))


def texts_of(books: Path, tokenizer: Any, study: Study) -> dict[str, Any]:
    """The passages that are measured, and the pieces to learn from by their number of tokens."""
    chosen = chosen_books(books, HELD_OUT + DEVELOPMENT + LEARNED)
    parts = chosen[:HELD_OUT], chosen[HELD_OUT : HELD_OUT + DEVELOPMENT], chosen[HELD_OUT + DEVELOPMENT :]
    lengths = {study.align.tokens, study.short.tokens, study.long.tokens}
    return {
        "held_out": asdict(passages_of(parts[0], tokenizer, study.tokens, study.passages)),
        "development": asdict(passages_of(parts[1], tokenizer, study.tokens, study.development)),
        **{str(length): pieces_of(parts[2], tokenizer, length) for length in lengths},
    }


class Runs:
    """The runs of the study: finished stages are rows of the ledger, with weights in `folder`, and are not repeated."""

    def __init__(self, encoder: Path, books: Path, folder: Path, ledger: Path, study: Study = Study()) -> None:
        from transformers import AutoModel, AutoTokenizer

        nothing = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        self.teacher = AutoModel.from_pretrained(encoder, attn_implementation="sdpa", **nothing).eval()
        self.folder, self.ledger, self.study = folder, Ledger(ledger), study
        folder.mkdir(parents=True, exist_ok=True)
        texts = folder / "texts.pt"
        if not texts.exists():
            torch.save(texts_of(books, AutoTokenizer.from_pretrained(encoder), study), texts)
        stored = torch.load(texts)
        self.held_out, self.development = (Passages(**stored[name]) for name in ("held_out", "development"))
        self.pieces = {int(name): x for name, x in stored.items() if name.isdigit()}
        with half():
            self.wanted = embeddings(self.teacher, self.held_out)

    def run(self, say: Say) -> None:
        for student in STUDENTS:
            self.train(student, say)

    def train(self, student: Student, say: Say) -> None:
        """The stages of a student that are left, in turn."""
        pattern = planned(self.plan(student.mechanism, say)) if student.pattern == "plan" else student.pattern
        model = linvit.linearize(self.teacher, student.mechanism, pattern).eval()
        if student.new:
            torch.manual_seed(0)
            for layer in attention_layers(model):
                layer.apply(model._init_weights)
        for stage in student.stages:
            name, weights = f"{student.name} {stage}", self.folder / f"{student.name}_{stage}.pt"
            values = {**asdict(student), "pattern": pattern, "stages": [], "study": asdict(self.study)}
            if self.ledger.result(name, values) is not None and weights.exists():
                model.load_state_dict(torch.load(weights))
                continue
            started, trained = time.monotonic(), getattr(self.study, stage, None)
            losses = self.learn(model, stage, trained) if trained else []
            seconds = time.monotonic() - started
            with half():
                vectors = embeddings(model, self.held_out)
            measured = measures(vectors, self.wanted, self.held_out.books)
            torch.save(model.state_dict(), weights)
            tokens = trained.steps * trained.batch * trained.tokens if trained else 0
            result = {
                "seconds": round(seconds, 1),
                "tokens": tokens,
                "pattern": pattern,
                "losses": losses[:: max(len(losses) // 8, 1)],
            }
            self.ledger.add(name, values, {**result, "measures": measured})
            say(f"{name}: kept {measured['kept']:.3f}, agreement {measured['agreement']:.3f}, {seconds:.0f} s")

    def learn(self, model: Any, stage: str, trained: Stage) -> list[float]:
        given = batches(self.pieces[trained.tokens], trained.steps, trained.batch, trained.seed)
        with half():
            return (align if stage == "align" else distill)(model, self.teacher, given, rate=trained.rate)

    def plan(self, mechanism: str, say: Say) -> list[float]:
        """The damage of each block on the books for development, from the ledger or from now."""
        name, values = f"{mechanism} plan", {"mechanism": mechanism, "study": asdict(self.study)}
        result = self.ledger.result(name, values)
        if result is None:
            started, aligned = time.monotonic(), linvit.linearize(self.teacher, mechanism)
            aligned.load_state_dict(torch.load(self.folder / f"{mechanism}_align.pt"))
            with half():
                wanted = embeddings(self.teacher, self.development)
                errors = damage(aligned, self.teacher, mechanism, self.development, wanted)
            result = {"seconds": round(time.monotonic() - started, 1), "measures": {"errors": errors}}
            self.ledger.add(name, values, result)
            say(f"{name}: {', '.join(f'{error:.3f}' for error in errors)}")
        return list(result["measures"]["errors"])


def half() -> torch.autocast:
    """bfloat16 for the products: training and measuring take a third of the time."""
    return torch.autocast("cpu", torch.bfloat16)


def run(call: Call) -> None:
    """Trains what is left of `STUDENTS`, and writes their tables."""
    torch.set_num_threads(1)
    ledger = EVIDENCE / "minilm.jsonl"
    Runs(Path(call.encoder), Path(call.books), Path("runs/evidence/minilm"), ledger).run(print)
    write_results(EVIDENCE / "linearize.md", ledger)


def measure_times(call: Call) -> None:
    """Time against length, on a quiet machine."""
    torch.set_num_threads(1)
    write_times(Path(call.encoder), EVIDENCE / "linearize.md")

"""MiniLM, a pretrained sentence encoder, with linear attention: aligned, distilled and measured on books.

The measure: passages of held-out books, of at most 512 tokens, look for their neighbour. A passage is found if the
nearest other one, by the cosine of the embeddings, is the one before or after it in the same book.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linvit
from linvit.models import align
from linvit.models.hugging_face import attention_layers
from linvit.studies.comparison import Say
from linvit.studies.pool import Ledger

BYTES = (200_000, 1_000_000)
"""Sizes of the books that are read."""
HELD_OUT, DEVELOPMENT, LEARNED = 20, 10, 60
"""Books of each part, in this order."""
PAD, BATCH = 0, 8


@dataclass(frozen=True)
class Passages:
    """Passages in the order of their books. ids: (passages, tokens), padded with PAD. books: (passages,)."""

    ids: Tensor
    books: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def inputs(self, index: slice | Tensor) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


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
    short: Stage = Stage(steps=200, batch=12, tokens=128, rate=1e-3, seed=1)
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


def chosen_books(folder: Path) -> list[Path]:
    """The books of a folder of Markdown, by the digest of their paths, one of each author, whose folder they are in."""
    paths = [path for path in folder.rglob("*.md") if BYTES[0] <= path.stat().st_size <= BYTES[1]]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).hexdigest())
    chosen = list({path.parent: path for path in reversed(paths)}.values())[::-1]
    needed = HELD_OUT + DEVELOPMENT + LEARNED
    if len(chosen) < needed:
        raise ValueError(
            f"{folder} has books of {len(chosen)} authors, expected {needed} or more: give the folder of the books."
        )
    return chosen[:needed]


def paragraphs(path: Path) -> list[str]:
    """Those of a book in Markdown, without headings and rules."""
    parts = (" ".join(part.split()) for part in path.read_text(encoding="utf-8").split("\n\n"))
    return [part for part in parts if part and not part.startswith(("#", "---", "***"))]


def passages_of(books: Sequence[Path], tokenizer: Any, tokens: int, count: int | None) -> Passages:
    """Whole paragraphs in passages of at most `tokens` tokens with [CLS] and [SEP]; the first `count` of each book.

    A longer paragraph is cut. The last passage of a book is left out, unless it is the only one.
    """
    rows, numbers = [], []
    for number, book in enumerate(books):
        of_book: list[list[int]] = [[]]
        for ids in tokenizer(paragraphs(book), add_special_tokens=False)["input_ids"]:
            ids = ids[: tokens - 2]
            if len(of_book[-1]) + len(ids) > tokens - 2:
                of_book.append([])
            of_book[-1].extend(ids)
            if count is not None and len(of_book) > count:
                break
        of_book = of_book[:-1][:count] or of_book
        rows += [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id] for ids in of_book]
        numbers += [number] * len(of_book)
    ids = torch.full((len(rows), tokens), PAD)
    for row, given in zip(ids, rows, strict=True):
        row[: len(given)] = torch.tensor(given)
    return Passages(ids, torch.tensor(numbers))


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of the tokens that count, of norm 1: MiniLM's embedding. states: (batch, tokens, width)."""
    weights = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@torch.no_grad()
def embeddings(model: Any, passages: Passages) -> Tensor:
    """(passages, width), float32."""
    parts = (passages.inputs(slice(start, start + BATCH)) for start in range(0, len(passages), BATCH))
    return torch.cat([pooled(model(**part).last_hidden_state.float(), part["attention_mask"]) for part in parts])


def nearest(vectors: Tensor) -> Tensor:
    """The passage with the largest cosine to each, other than itself."""
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)


def found(vectors: Tensor, books: Tensor) -> Tensor:
    """Whether the nearest passage of each is its neighbour in the book, bool."""
    best, own = nearest(vectors), torch.arange(len(vectors))
    return ((best - own).abs() == 1) & (books[best] == books)


def measures(student: Tensor, teacher: Tensor, books: Tensor) -> dict[str, Any]:
    """Accuracies, kept: the student's over the teacher's, with a 95 % interval over books, and agreement of nearest.

    error: |student - teacher|² / |teacher - its mean|² of the embeddings.
    """
    hits = torch.stack([found(student, books), found(teacher, books)]).double()
    of_books = torch.stack([hits[:, books == book].sum(1) for book in books.unique()])
    draws = torch.randint(len(of_books), (2000, len(of_books)), generator=torch.Generator().manual_seed(0))
    sums = of_books[draws].sum(1)
    low, high = (sums[:, 0] / sums[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    right = hits.mean(1)
    return {
        "top1": right[0].item(),
        "teacher": right[1].item(),
        "kept": (right[0] / right[1]).item(),
        "low": low,
        "high": high,
        "agreement": (nearest(student) == nearest(teacher)).double().mean().item(),
        "error": relative(student, teacher).item(),
    }


def relative(given: Tensor, wanted: Tensor) -> Tensor:
    """|given - wanted|² / |wanted - its mean over all rows|²."""
    return (given - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()


def pieces_of(books: Sequence[Path], tokenizer: Any, tokens: int) -> Tensor:
    """The text of books cut into pieces of exactly `tokens` tokens with [CLS] and [SEP], (pieces, tokens)."""
    rows = []
    for book in books:
        ids = torch.tensor([*chain(*tokenizer(paragraphs(book), add_special_tokens=False)["input_ids"])])
        rows.append(ids[: len(ids) // (tokens - 2) * (tokens - 2)].view(-1, tokens - 2))
    return torch.nn.functional.pad(
        torch.nn.functional.pad(torch.cat(rows), (1, 0), value=tokenizer.cls_token_id),
        (0, 1),
        value=tokenizer.sep_token_id,
    )


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
    learned = list(student.encoder.parameters())
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(given) + 1, pct_start=0.1)
    losses = []
    for batch in given:
        loss = distillation(student, teacher, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        torch.clear_autocast_cache()
        schedule.step()
        losses.append(loss.item())
    return losses


def damage(student: Any, teacher: Any, mechanism: str, passages: Passages, wanted: Tensor) -> list[float]:
    """The error of the embeddings when one block alone is linear, aligned as in the student, for each block."""
    blocks, errors = len(attention_layers(teacher)), []
    for block in range(blocks):
        one = linvit.linearize(teacher, mechanism, "".join("SL"[block == each] for each in range(blocks)))
        attention_layers(one)[block].load_state_dict(attention_layers(student)[block].state_dict())
        errors.append(relative(embeddings(one, passages), wanted).item())
    return errors


def planned(errors: Sequence[float]) -> str:
    """The pattern that leaves the blocks with the largest errors softmax."""
    worst = sorted(range(len(errors)), key=lambda block: -errors[block])[:SOFTMAX]
    return "".join("S" if block in worst else "L" for block in range(len(errors)))


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
            tokenizer, chosen = AutoTokenizer.from_pretrained(encoder), chosen_books(books)
            held_out, development, learned = (
                chosen[:HELD_OUT],
                chosen[HELD_OUT:][:DEVELOPMENT],
                chosen[HELD_OUT + DEVELOPMENT :],
            )
            torch.save(
                {
                    "held_out": asdict(passages_of(held_out, tokenizer, study.tokens, study.passages)),
                    "development": asdict(passages_of(development, tokenizer, study.tokens, study.development)),
                    **{str(n): pieces_of(learned, tokenizer, n) for n in {study.align.tokens, study.short.tokens, study.long.tokens}},
                },
                texts,
            )
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

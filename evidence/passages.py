"""Passages of books, their embeddings, and how often a passage finds its neighbour.

The nearest passage is the one with the largest cosine of the embeddings, other than the passage itself, among all
passages of all books. A passage is found if that is the one before or after it in the same book.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BYTES = (200_000, 1_000_000)
"""Sizes of the books that are read."""
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


def chosen_books(folder: Path, count: int) -> list[Path]:
    """The first books of a folder of Markdown, one of each author, whose folder they are in.

    The order is that of the SHA-256 of their paths below the folder: of an author's books the first is taken, and
    authors come in the order of their last one.
    """
    paths = [path for path in folder.rglob("*.md") if BYTES[0] <= path.stat().st_size <= BYTES[1]]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).hexdigest())
    chosen = list({path.parent: path for path in reversed(paths)}.values())[::-1]
    if len(chosen) < count:
        raise ValueError(
            f"{folder} has books of {len(chosen)} authors, expected {count} or more: give the folder of the books."
        )
    return chosen[:count]


def paragraphs(path: Path) -> list[str]:
    """Those of a book in Markdown, without headings and rules."""
    parts = (" ".join(text.split()) for text in path.read_text(encoding="utf-8").split("\n\n"))
    return [text for text in parts if text and not text.startswith(("#", "---", "***"))]


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
    batches = (passages.inputs(slice(start, start + BATCH)) for start in range(0, len(passages), BATCH))
    return torch.cat([pooled(model(**batch).last_hidden_state.float(), batch["attention_mask"]) for batch in batches])


def nearest(vectors: Tensor) -> Tensor:
    """The passage with the largest cosine to each, other than itself."""
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)


def finds_neighbour(vectors: Tensor, books: Tensor) -> Tensor:
    """Whether the nearest passage of each is its neighbour in the book, bool."""
    best = nearest(vectors)
    return ((best - torch.arange(len(best))).abs() == 1) & (books[best] == books)


def measures(student: Tensor, teacher: Tensor, books: Tensor) -> dict[str, Any]:
    """Accuracies, kept: the student's over the teacher's, with a 95 % interval over books, and agreement of nearest.

    error: |student - teacher|² / |teacher - its mean|² of the embeddings.
    """
    hits = torch.stack([finds_neighbour(student, books), finds_neighbour(teacher, books)]).double()
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
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(sum(map(len, rows)), 2)
    return torch.cat([ends[:, :1], torch.cat(rows), ends[:, 1:]], dim=1)

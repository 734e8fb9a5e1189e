"""Text as tokens, by bytes or a Hugging Face tokenizer; and streams of documents, cut into rows."""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.disk import check_regular
from linvit.errors import SettingError
from linvit.files import explained

IGNORED = -100
WIDTH = np.uint32
BYTES = "bytes"
SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
TOGETHER, TOGETHER_BYTES = 256, 2**22  # documents that are tokenized at once, and their size
INTERVAL = 10.0  # seconds between log lines
LEAST_LOST = 1e-4  # share of a text's bytes; fewer do not show in bits per byte

logger = logging.getLogger(__name__)


class Bytes:
    """Every byte is a token; token 256 is the separator between documents."""

    vocabulary = 257
    separator = 256

    def encode(self, text: bytes) -> Sequence[int]:
        """The tokens of UTF-8 text, without separators."""
        return list(text)

    def encode_batch(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        """The tokens of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not valid UTF-8 become �."""
        return bytes(token for token in tokens if token < self.separator).decode("utf-8", "replace")

    def widths(self, text: bytes) -> Sequence[int]:
        """The number of bytes that each token of the text stands for; their sum is its length."""
        return [1] * len(text)

    def fingerprint(self) -> str:
        """A string that is equal for tokenizers that produce the same tokens, regardless of their names."""
        return BYTES


class HuggingFaceTokenizer:
    """A tokenizer of the tokenizers library, with the methods of Bytes.

    Truncation, padding and dropout that are stored in it are switched off. Special tokens that a text spells are text.

    Args:
        name: a tokenizer.json, a folder with one, or a name on the Hugging Face hub, which is downloaded.
        separator: the token between documents; by default the first of SEPARATORS that the tokenizer knows.
    """

    def __init__(self, name: str, separator: str | None = None) -> None:
        import tokenizers

        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        with explained(
            lambda reason: (
                f"The tokenizer {name} cannot be read ({reason}): use a tokenizer.json, a folder with one, or a name"
                " on the Hugging Face hub."
            )
        ):
            if name.endswith(".json"):
                check_regular(path)
            if path.is_file():
                known = tokenizers.Tokenizer.from_file(str(path))
            else:
                known = tokenizers.Tokenizer.from_pretrained(name)
        known.no_truncation()
        known.no_padding()
        known.encode_special_tokens = True
        if getattr(known.model, "dropout", None):
            known.model.dropout = None
        self.tokenizer = known
        self.vocabulary = 1 + max(known.get_vocab().values(), default=-1)  # the numbers may have gaps
        names = SEPARATORS if separator is None else (separator,)
        self.separator: int = next((token for name in names if (token := known.token_to_id(name)) is not None), -1)
        if self.separator < 0:
            raise SettingError(
                f"The tokenizer {name} has no token {' or '.join(names)}: set `separator` to its token between"
                " documents."
            )

    def encode(self, text: bytes) -> Sequence[int]:
        return self.tokenizer.encode(_string(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[bytes]) -> Sequence[Sequence[int]]:
        strings = [_string(text) for text in texts]
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(strings, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token != self.separator])

    def widths(self, text: bytes) -> Sequence[int]:
        exact = text.decode("utf-8", "surrogateescape")
        offsets = self.tokenizer.encode(_string(text), add_special_tokens=False).offsets
        if not offsets:
            return []
        starts = [0, *(start for start, _ in offsets[1:]), len(exact)]
        return [len(exact[start:stop].encode("utf-8", "surrogateescape")) for start, stop in pairwise(starts)]

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.tokenizer.to_str()} {self.separator} special as text".encode()).hexdigest()


def _string(text: bytes) -> str:
    """UTF-8 text with a � for each invalid byte."""
    return re.sub("[\udc80-\udcff]", "�", text.decode("utf-8", "surrogateescape"))


Tokenizer = Bytes | HuggingFaceTokenizer


def decoded_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to that of the tokens before them: spaces can depend on these."""
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


def open_tokenizer(name: str, separator: str | None = None) -> Tokenizer:
    """The tokenizer of that name: "bytes", or a Hugging Face tokenizer.

    Raises ValueError as HuggingFaceTokenizer does, and for a separator for "bytes", which has its own.
    """
    if name != BYTES:
        return HuggingFaceTokenizer(name, separator)
    if separator is not None:
        raise SettingError(
            f"`separator` is {separator!r}, but the tokenizer 'bytes' has its own token for that: leave it out."
        )
    return Bytes()


@dataclass(frozen=True)
class Stream:
    """Documents in one sequence: separator, document, separator, document … and a separator at the end.

    tokens: (tokens,) unsigned integers. widths: (tokens,) WIDTH, bytes that each token stands for, 0 for separators;
    None if unknown. documents: number of documents.
    """

    tokens: np.ndarray
    widths: np.ndarray | None
    documents: int


def dtype_for(vocabulary: int) -> type[np.generic]:
    """The narrowest integer type for all tokens."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def tokenized(
    documents: Iterable[bytes],
    tokenizer: Tokenizer,
    measures: bool,
    take: Callable[[np.ndarray, np.ndarray], object],
    most: int | None = None,
) -> tuple[int, int, str]:
    """Hands each document to `take`, after a separator, and a separator at the end.

    take: gets the tokens, and the bytes that each stands for (WIDTH), which are zeros unless it measures. most: the
    document that reaches this number of tokens is the last.

    Returns:
        The numbers of documents and of tokens, and a sentence on the text that is lost, see about_lost.
    """
    dtype = dtype_for(tokenizer.vocabulary)
    lost: Counter[str] = Counter()
    count = total = size = 0
    said = time.monotonic()
    pairs = (pair for some in groups(documents) for pair in zip(some, tokenizer.encode_batch(some), strict=True))
    for text, encoded in pairs:
        tokens = np.asarray([tokenizer.separator, *encoded], dtype)
        widths = np.zeros(len(tokens), WIDTH)
        if measures:
            widths[1:] = tokenizer.widths(text)
            lost += Counter(_string(text)) - Counter(tokenizer.decode(encoded))
            size += len(text)
        take(tokens, widths)
        count, total = count + 1, total + len(tokens)
        if time.monotonic() > said + INTERVAL:
            logger.info("Packing text: %s documents, %s tokens so far.", f"{count:,}", f"{total:,}")
            said = time.monotonic()
        if most is not None and total >= most:
            break
    take(np.array([tokenizer.separator], dtype), np.zeros(1, WIDTH))
    return count, total + 1, about_lost(lost, size)


def groups(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The documents in lists of up to TOGETHER, or TOGETHER_BYTES and one document."""
    texts: list[bytes] = []
    size = 0
    for document in documents:
        texts.append(document)
        size += len(document)
        if len(texts) == TOGETHER or size >= TOGETHER_BYTES:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def join(documents: Iterable[bytes], tokenizer: Tokenizer, measures: bool = True) -> Stream:
    """The stream of these documents in memory; with widths if it measures."""
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    count, _, lost = tokenized(documents, tokenizer, measures, lambda *piece: pieces.append(piece))
    if lost:
        logger.warning(lost)
    tokens, widths = map(np.concatenate, zip(*pieces, strict=True))
    return Stream(tokens, widths if measures else None, count)


def about_lost(lost: Counter[str], total: int) -> str:
    """A sentence on the characters that a text of `total` bytes loses when it is encoded; "" if there are few."""
    count = sum(number * len(character.encode()) for character, number in lost.items())
    if count <= LEAST_LOST * total:
        return ""
    examples = ", ".join(repr(character) for character, _ in lost.most_common(3))
    return (
        f"Decoding the tokens does not restore {count:,} of the {total:,} bytes of the held-out text"
        f" ({count / total:.2%}), most often {examples}: compare bits per byte only between runs with this tokenizer."
    )


@dataclass(eq=False)
class Rows(Dataset[Any]):
    """A stream cut into rows (tokens, {"targets", "documents", "bytes"}); each next token is a target exactly once.

    Tokens, targets and documents are int64 (context,). The padding of the last row has IGNORED as targets. documents:
    the number of each token's document in the row if keeps_apart, otherwise 0. bytes: number for the targets, 0 if
    unknown. Rows of padding follow up to a multiple of `multiple`, because processes that train together must read
    the same number of rows.
    """

    stream: Stream
    context: int
    separator: int
    keeps_apart: bool
    multiple: int = 1

    def __len__(self) -> int:
        rows = -(-(len(self.stream.tokens) - 1) // self.context)
        return -(-rows // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        start = index * self.context
        piece = slice(start, start + self.context + 1)
        held = torch.from_numpy(self.stream.tokens[piece].astype(np.int64))
        row = held.new_full((self.context + 1,), self.separator)
        row[: len(held)] = held
        targets = row[1:].clone()
        targets[max(0, len(held) - 1) :] = IGNORED
        documents = torch.zeros_like(targets)
        if self.keeps_apart:
            documents = (row[:-1] == self.separator).cumsum(0)
            documents[max(0, len(held) - 1) :] = self.context  # the padding is one document
        widths = self.stream.widths
        count = 0 if widths is None else int(widths[start + 1 : start + self.context + 1].sum())
        return row[:-1], {"targets": targets, "documents": documents, "bytes": torch.tensor(count)}

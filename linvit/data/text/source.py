"""The base class of text sources: text that is packed once into files of tokens, and read as rows of them."""

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch.utils.data import Dataset

from linvit.data.disk import none_usable, read_json, warn_or_raise
from linvit.data.source import Source, Workers
from linvit.data.text.tokens import BYTES, WIDTH, Rows, Stream, Tokenizer, dtype_for, open_tokenizer, tokenized
from linvit.environment import replica
from linvit.files import replacing, write_json
from linvit.ranges import Count, Range, Seed

LONGEST_ROW = 2**20
CACHE = "data/packed"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextPreprocessing:
    """The conversion of text to a network's input, and the text it was trained on.

    tokenizer: "bytes" or the name of a Hugging Face tokenizer. separator: the name of its token between documents.
    context: tokens per row. corpus: a description of the text.
    """

    tokenizer: str
    separator: str | None
    context: int
    corpus: str

    def open(self) -> Tokenizer:
        """The tokenizer itself."""
        return open_tokenizer(self.tokenizer, self.separator)


class TextSource(Source):
    """Rows of tokens, whose targets are the next tokens (see Rows), from packed files.

    A packed file is found by the identity of the text and by the tokenizer. A subclass has identity, texts and cache,
    the folder of the packed files.

    context: tokens per row. batch_size: rows per batch. tokenizer: "bytes", or the file or name of a Hugging Face
    tokenizer. separator: its token between documents, if it is not a common one. keeps_apart: documents in the same row
    do not see each other. seed: of the order of the rows. num_workers: processes that read.
    """

    task = "language"
    item = "row"
    smaller = ("batch_size", "context")
    preprocessing: TextPreprocessing
    cache: Path

    def __init__(
        self,
        context: Annotated[int, Range(2, LONGEST_ROW)] = 256,
        batch_size: Count = 16,
        tokenizer: str = BYTES,
        separator: str | None = None,
        keeps_apart: bool = True,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.context = context
        self.keeps_apart = keeps_apart
        self.tokenizer = open_tokenizer(tokenizer, separator)
        self.names = tokenizer, separator
        self.class_names: list[str] = []
        self._streams: dict[str, Stream] = {}

    @property
    def num_classes(self) -> int:
        return self.tokenizer.vocabulary

    def train_set(self) -> Dataset[Any]:
        return self._rows("train")

    def val_set(self) -> Dataset[Any]:
        return self._rows("val", replica()[1])

    def _rows(self, split: str, multiple: int = 1) -> Rows:
        if split not in self._streams:
            self._streams[split] = self.stream(split)
        return Rows(self._streams[split], self.context, self.tokenizer.separator, self.keeps_apart, multiple)

    @abstractmethod
    def identity(self, split: str) -> list[Any]:
        """What the documents of "train" or "val" depend on, as JSON."""

    @abstractmethod
    def texts(self, split: str) -> Iterable[bytes | str]:
        """The documents of "train" or "val" in UTF-8; a sentence for each that cannot be used."""

    def most_tokens(self, split: str) -> int | None:
        """Packing ends with the document that reaches this number; None for all."""
        return None

    def prepare_data(self) -> None:
        """Packs the splits that are not packed yet, in one process per machine."""
        for split in ("train", "val"):
            self.packed(split)

    def stream(self, split: str) -> Stream:
        """The tokens of "train" or "val", mapped from their packed file."""
        path = self.packed(split)
        about, dtype = read_json(path.with_suffix(".json")), dtype_for(self.tokenizer.vocabulary)
        for file, kind in ((path, dtype), (path.with_suffix(".widths"), WIDTH))[: 2 if split == "val" else 1]:
            if not file.is_file() or file.stat().st_size != np.dtype(kind).itemsize * about["tokens"]:
                raise ValueError(
                    f"{file} is missing or damaged: delete the folder {self.cache} to pack the text again."
                )
        self.leave_out(about["unusable"], about["documents"])
        if "lost" in about:
            logger.warning(about["lost"])
        tokens = np.memmap(path, dtype, mode="r")
        widths = np.memmap(path.with_suffix(".widths"), WIDTH, mode="r") if split == "val" else None
        return Stream(tokens, widths, about["documents"])

    def leave_out(self, sentences: list[str], documents: int) -> None:
        """Warns of documents that are left out; raises ValueError for more than max_corrupt, or if none is left."""
        if sentences and not documents:
            raise none_usable(sentences, "document")
        warn_or_raise(sentences, self.max_corrupt, "max_corrupt")

    def packed(self, split: str) -> Path:
        """The file of a split's tokens, which is written if it does not exist."""
        most = self.most_tokens(split)
        identity = [split, self.identity(split), self.tokenizer.fingerprint(), WIDTH.__name__, most]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        path = self.cache / f"{split}_{key}.tokens"
        if not path.with_suffix(".json").is_file():
            pack(self.texts(split), self.tokenizer, path, split == "val", most)
        return path


def pack(
    texts: Iterable[bytes | str], tokenizer: Tokenizer, path: Path, measures: bool, max_tokens: int | None = None
) -> None:
    """Writes documents as a file of tokens, a file of their widths in bytes (zeros unless it measures), and a .json.

    Each file is written completely or not at all, so if there is a .json the others are complete. It has the numbers of
    documents and tokens, the sentences among the texts, which stand for documents that cannot be used, and the sentence
    of about_lost, if it measures and there is one.
    """
    unusable: list[str] = []
    with (
        replacing(path) as temporary,
        replacing(path.with_suffix(".widths")) as beside,
        temporary.open("wb") as tokens,
        beside.open("wb") as widths,
    ):

        def write(numbers: np.ndarray, sizes: np.ndarray) -> None:
            numbers.tofile(tokens)
            sizes[: len(sizes) if measures else 0].tofile(widths)

        logger.info("Packing text into %s.", path)
        count, total, lost = tokenized(usable(texts, unusable), tokenizer, measures, write, max_tokens)
    about = {"documents": count, "tokens": total, "unusable": unusable}
    write_json(path.with_suffix(".json"), about | ({"lost": lost} if lost else {}))


def usable(texts: Iterable[bytes | str], unusable: list[str]) -> Iterator[bytes]:
    """The documents among the texts; the sentences are appended to `unusable`."""
    for text in texts:
        if isinstance(text, str):
            unusable.append(text)
        else:
            yield text

"""The base class of text sources: rows of tokens whose targets are the next tokens."""

from dataclasses import dataclass
from typing import Annotated, Any

from torch.utils.data import Dataset

from linvit.data.source import Source, Workers
from linvit.data.text.tokens import BYTES, Rows, Stream, Tokenizer, open_tokenizer
from linvit.environment import replica
from linvit.ranges import Count, Range, Seed

LONGEST_ROW = 2**20


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
    """Rows of tokens, whose targets are the next tokens; see Rows.

    context: tokens per row. batch_size: rows per batch. tokenizer: "bytes", or the file or name of a Hugging Face
    tokenizer. separator: its token between documents, if it is not a common one. keeps_apart: documents in the same row
    do not see each other. seed: of the order of the rows. num_workers: processes that read.
    """

    task = "language"
    item = "row"
    smaller = ("batch_size", "context")
    preprocessing: TextPreprocessing  # type: ignore[assignment]

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

    def stream(self, split: str) -> Stream:
        """The tokens of "train" or "val"."""
        raise NotImplementedError

    def train_set(self) -> Dataset[Any]:
        return self._rows("train")

    def val_set(self) -> Dataset[Any]:
        return self._rows("val", replica()[1])

    def _rows(self, split: str, multiple: int = 1) -> Rows:
        if split not in self._streams:
            self._streams[split] = self.stream(split)
        return Rows(self._streams[split], self.context, self.tokenizer.separator, self.keeps_apart, multiple)

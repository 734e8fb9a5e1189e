"""Text of Hugging Face data sets, packed once into a file of tokens or streamed."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from linvit.data.order import Batches
from linvit.data.source import load_rows
from linvit.data.text.source import CACHE, LONGEST_ROW, TextPreprocessing, TextSource
from linvit.data.text.tokens import Rows, Stream, dtype_for, groups
from linvit.environment import replica
from linvit.errors import SettingError
from linvit.ranges import Count, Range

SHUFFLED = 10_000  # documents among which a stream chooses the next at random


class HuggingFaceText(TextSource):
    """Rows of tokens from the documents of a data set that `datasets.load_dataset` reads.

    Args:
        path: Name on the Hugging Face hub, which is downloaded, or a local folder or kind of file.
        tokenizer: "bytes", or the file or name of a Hugging Face tokenizer.
        configuration: Name of the configuration (subset), if there are several.
        column: Column of the documents' text.
        train_split: Split to train on.
        val_split: Split to validate on; null for the first val_documents of the train split, which are not trained on.
        val_documents: Number of documents to validate on.
        max_tokens: Packing ends with the document that reaches this number of training tokens; null for all.
        streaming: Reads while training, instead of packing first; a stopped run resumes after the documents read.
        epoch_rows: Rows per epoch of a stream, summed over all processes.
        cache: Folder of the packed files.
        options: Further arguments of load_dataset, such as data_files.
        context, batch_size, keeps_apart, kwargs: See TextSource.

    Packed files are found by these arguments, not by the content of the data: delete them if the data have changed.
    Raises ValueError for arguments that the library refuses.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str,
        configuration: str | None = None,
        column: str = "text",
        train_split: str = "train",
        val_split: str | None = None,
        val_documents: Count = 2000,
        max_tokens: Count | None = None,
        streaming: bool = False,
        epoch_rows: Count = 262_144,
        cache: str = CACHE,
        options: dict[str, Any] | None = None,
        context: Annotated[int, Range(2, LONGEST_ROW)] = 2048,
        batch_size: Count = 8,
        keeps_apart: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(context, batch_size, tokenizer, keeps_apart=keeps_apart, **kwargs)
        if streaming and self.num_workers:
            raise SettingError(
                f"`num_workers` is {self.num_workers}, but a stream is read by the training process: set it to 0."
            )
        self.arguments = {"path": path, "name": configuration, **(options or {})}
        self.column, self.val_documents, self.max_tokens = column, val_documents, max_tokens
        self.train_split, self.val_split = train_split, val_split
        self.streaming, self.epoch_rows, self.cache = streaming, epoch_rows, Path(cache)
        self.preprocessing = TextPreprocessing(*self.names, context, f"{path} {configuration or ''}".strip())
        self._stream: TextStream | None = None
        self._skipped = 0

    def prepare_data(self) -> None:
        if self.streaming:
            self.packed("val")
        else:
            super().prepare_data()

    def identity(self, split: str) -> list[Any]:
        return [self.arguments, self.column, self.train_split, self.val_split, self.val_documents]

    def texts(self, split: str) -> Iterable[bytes]:
        return map(self.text, self.documents(split, self.streaming))

    def most_tokens(self, split: str) -> int | None:
        return self.max_tokens if split == "train" else None

    def train_dataloader(self) -> Batches:
        if not self.streaming:
            return super().train_dataloader()
        self._stream = TextStream(self, self._skipped)
        if len(self._stream) < self.batch_size:
            raise SettingError(
                f"`epoch_rows` is {self.epoch_rows}, so each process gets {len(self._stream)} rows per epoch, fewer"
                f" than one batch of {self.batch_size}: set it higher."
            )
        return Batches(self._stream, drop_last=True, **self._loading(False))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"documents": self._stream.read if self._stream else self._skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._skipped = state_dict["documents"]
        if self._stream:
            self._stream.skipped = self._stream.read = self._skipped

    def documents(self, split: str, streaming: bool = False) -> Any:
        """The rows of the data set that belong to "train" or "val"."""
        name = self.train_split if split == "train" or self.val_split is None else self.val_split
        rows = load_rows(self.arguments, name, streaming, column=self.column)
        if split == "train":
            return rows.skip(self.val_documents) if self.val_split is None else rows
        return rows.take(self.val_documents) if streaming else rows.select(range(min(len(rows), self.val_documents)))

    def text(self, row: Mapping[str, Any]) -> bytes:
        """The document of a row of the data set in UTF-8; raises ValueError if it is not text."""
        text = row.get(self.column)
        if not isinstance(text, str):
            raise SettingError(
                f"The data set {self.arguments['path']} has a row whose {self.column!r} is {text!r:.40}, expected text:"
                " set `column` to a column of text, or remove such rows from the data."
            )
        return text.encode("utf-8", "replace")


class TextStream(IterableDataset[Any]):
    """Rows of a stream of documents, `epoch_rows` per epoch; it resumes where it stopped.

    read: number of documents of the full stream that were read. skipped: number of documents to skip first.
    """

    def __init__(self, source: HuggingFaceText, skipped: int = 0) -> None:
        self.source = source
        self.skipped = skipped
        self.read = skipped
        self._rows: Iterator[tuple[Tensor, Mapping[str, Tensor]]] | None = None

    def __len__(self) -> int:
        return self.source.epoch_rows // replica()[1]

    def __iter__(self) -> Iterator[Any]:
        self._rows = self._rows or self._all_rows()
        return itertools.islice(self._rows, len(self))

    def _all_rows(self) -> Iterator[Any]:
        source, mark = self.source, self.source.tokenizer.separator
        dtype = dtype_for(source.tokenizer.vocabulary)
        held = np.zeros(0, dtype)
        for texts in groups(self._documents()):
            encoded = source.tokenizer.encode_batch(texts)
            held = np.concatenate((held, *(np.asarray([mark, *tokens], dtype) for tokens in encoded)))
            whole = (len(held) - 1) // source.context
            rows = Rows(Stream(held, None, len(texts)), source.context, mark, source.keeps_apart)
            for index in range(whole):
                yield rows[index]
            held = held[whole * source.context :]

    def _documents(self) -> Iterator[bytes]:
        """This process's share of the documents, repeated without end, each time in a different order."""
        rank, world = replica()
        passed_over = 0
        for number in itertools.count():
            rows = self.source.documents("train", streaming=True)
            rows = rows.shuffle(seed=self.source.seed + number, buffer_size=SHUFFLED)
            place = -1
            for place, row in enumerate(rows):
                if passed_over < self.skipped:
                    passed_over += 1
                    continue
                self.read += 1
                if place % world == rank:
                    yield self.source.text(row)
            if place < 0:
                raise SettingError(
                    f"The data set {self.source.arguments['path']} has no documents to train on besides the"
                    f" {self.source.val_documents} held-out ones: set `val_documents` lower."
                )

"""Memory tasks: pairs to look up, and symbols to repeat. Each sequence is generated from its index.

They need memory proportional to the number of pairs: a softmax cache grows with it, a fixed state does not.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.source import Source, Workers
from linvit.data.text.tokens import IGNORED
from linvit.errors import SettingError
from linvit.ranges import Count, Range, Seed

TRAINED, HELD_OUT = 0, 1  # streams of random numbers
Several = Annotated[int, Range(2, 2**20)]
Length = Annotated[int, Range(1, 2**20)]


@dataclass(frozen=True)
class RecallPreprocessing:
    """A description of the sequences; nothing needs to be prepared."""

    corpus: str


@dataclass(eq=False)
class GeneratedSequences(Dataset[Any]):
    """Sequences (tokens, {"targets", "documents", "bytes"}) like those of Rows, made from (stream, seed, index)."""

    source: "RecallSource"
    stream: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = np.random.default_rng([self.stream, self.source.seed, index])
        tokens, targets = self.source.generate(generator)
        zeros = np.zeros_like(tokens)
        about = {"targets": torch.from_numpy(targets), "documents": torch.from_numpy(zeros), "bytes": torch.tensor(0)}
        return torch.from_numpy(tokens), about


class RecallSource(Source):
    """Sequences in which only the answers are targets.

    length: number of training sequences. val_length: number of validation sequences. batch_size: sequences per batch.
    seed: of all sequences. num_workers: processes that generate them.
    """

    task = "recall"
    item = "sequence"
    preprocessing: RecallPreprocessing

    def __init__(
        self,
        words: str,
        vocabulary: Several,
        length: Annotated[int, Range(1, 10**8)] = 20_000,
        val_length: Count = 1000,
        batch_size: Count = 64,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.vocabulary = vocabulary
        self.length, self.val_length = length, val_length
        self.class_names: list[str] = []
        self.preprocessing = RecallPreprocessing(words)

    @property
    def num_classes(self) -> int:
        return self.vocabulary

    @abstractmethod
    def generate(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A sequence of tokens and its targets, IGNORED except for the answers; both int64 (tokens,)."""

    def train_set(self) -> Dataset[Any]:
        return GeneratedSequences(self, TRAINED, self.length)

    def val_set(self) -> Dataset[Any]:
        return GeneratedSequences(self, HELD_OUT, self.val_length)


class Recall(RecallSource):
    """Multi-query associative recall: key value key value …, then the keys alone, whose values are the targets.

    Args:
        pairs: Number of pairs of key and value; a sequence has three tokens per pair.
        keys: Number of different keys.
        values: Number of different values.
        options: See RecallSource.

    Source: Arora et al., *Zoology*, arXiv 2312.04927; here every pair is asked for once, in random order, after all
    pairs.
    """

    fixed = ("words", "vocabulary")

    def __init__(self, pairs: Length = 16, keys: Length = 128, values: Several = 128, **options: Any) -> None:
        words = f"recall of {pairs} of {keys} keys, {values} values"
        super().__init__(words, keys + values, **options)
        if pairs > keys:
            raise SettingError(
                f"`pairs` is {pairs}, but there are {keys} `keys`, each of which occurs once: set it lower."
            )
        self.pairs, self.keys, self.values = pairs, keys, values

    def generate(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys = generator.choice(self.keys, self.pairs, replace=False)
        values = self.keys + generator.integers(self.values, size=self.pairs)
        asked = generator.permutation(self.pairs)
        context = np.stack((keys, values), axis=1).ravel()
        tokens = np.concatenate((context, keys[asked])).astype(np.int64)
        targets = np.concatenate((np.full_like(context, IGNORED), values[asked])).astype(np.int64)
        return tokens, targets


class Copy(RecallSource):
    """Random symbols, a separator, and the same symbols again, which are the targets.

    Args:
        symbols: Number of symbols to repeat.
        alphabet: Number of different symbols.
        options: See RecallSource.
    """

    fixed = ("words", "vocabulary")

    def __init__(self, symbols: Length = 32, alphabet: Several = 32, **options: Any) -> None:
        words = f"copies of {symbols} of {alphabet} symbols"
        super().__init__(words, alphabet + 1, **options)
        self.symbols, self.alphabet = symbols, alphabet

    def generate(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        text = generator.integers(self.alphabet, size=self.symbols)
        tokens = np.concatenate((text, [self.alphabet], text[:-1])).astype(np.int64)
        targets = np.concatenate((np.full(self.symbols, IGNORED), text)).astype(np.int64)
        return tokens, targets

"""Tasks of memory: pairs to look up, and text to repeat; every sequence is drawn from its number.

What a fixed state must hold grows with the pairs, and what softmax attention keeps grows with it: here they part.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.source import Source
from linvit.data.text.tokens import IGNORED

HELD_OUT = 1  # the stream of random numbers of validation sequences; 0 is training's


@dataclass(frozen=True)
class RecallPreprocessing:
    """What a sequence is in words; there is nothing else to prepare."""

    corpus: str


class Drawn(Dataset[Any]):
    """Sequences (tokens, {"targets", "documents", "bytes"}) as of text, drawn from (part, seed, index)."""

    def __init__(self, source: "Memorized", part: int, length: int) -> None:
        self.source = source
        self.part = part
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = np.random.default_rng([self.part, self.source.drawn_from, index])
        tokens, targets = self.source.draw(drawn)
        zeros = np.zeros_like(tokens)
        about = {"targets": torch.from_numpy(targets), "documents": torch.from_numpy(zeros), "bytes": torch.tensor(0)}
        return torch.from_numpy(tokens), about


class Memorized(Source):
    """Sequences of which only the answers are asked for.

    length: training sequences; val_length: others, to measure on. drawn_from: what both are drawn from.
    """

    task = "recall"
    item = "sequence"
    preprocessing: RecallPreprocessing  # type: ignore[assignment]

    def __init__(
        self, words: str, vocabulary: int, length: int, val_length: int, batch_size: int, seed: int, num_workers: int
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        if length < 1 or val_length < 1:
            raise ValueError(
                f"`length` is {length} and `val_length` is {val_length}, expected at least one sequence each: set them"
                " higher."
            )
        self.vocabulary = vocabulary
        self.length, self.val_length = length, val_length
        self.drawn_from = seed
        self.class_names: list[str] = []
        self.preprocessing = RecallPreprocessing(words)

    @property
    def num_classes(self) -> int:
        return self.vocabulary

    def draw(self, drawn: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A sequence of tokens and its targets, IGNORED where nothing is asked; both int64 (tokens,)."""
        raise NotImplementedError

    def train_set(self) -> Dataset[Any]:
        return Drawn(self, 0, self.length)

    def val_set(self) -> Dataset[Any]:
        return Drawn(self, HELD_OUT, self.val_length)


class Recall(Memorized):
    """Associative recall with several queries: key value key value …, then keys alone, each to be answered.

    Args:
        pairs: Keys with their values; a sequence has three tokens a pair.
        keys: Different keys there are.
        values: Different values there are.
        length: Training sequences, drawn anew for each seed.
        val_length: Sequences to measure on.
        batch_size: Sequences a batch.
        seed: All sequences are drawn from it.
        num_workers: Processes that draw.

    Raises ValueError for more pairs than keys, and for no pair or sequence.

    Source: multi-query associative recall (Arora et al., *Zoology*, arXiv 2312.04927), with every pair asked for once,
    in random order, after all pairs.
    """

    def __init__(
        self,
        pairs: int = 16,
        keys: int = 128,
        values: int = 128,
        length: int = 20_000,
        val_length: int = 1000,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        words = f"recall of {pairs} of {keys} keys, {values} values"
        super().__init__(words, keys + values, length, val_length, batch_size, seed, num_workers)
        if not 1 <= pairs <= keys or values < 2:
            raise ValueError(
                f"`pairs` is {pairs}, `keys` is {keys} and `values` is {values}, expected 1 ≤ pairs ≤ keys and 2"
                " values or more: change them."
            )
        self.pairs, self.keys, self.values = pairs, keys, values

    def draw(self, drawn: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys = drawn.choice(self.keys, self.pairs, replace=False)
        values = self.keys + drawn.integers(self.values, size=self.pairs)
        asked = drawn.permutation(self.pairs)
        told = np.stack((keys, values), axis=1).ravel()
        tokens = np.concatenate((told, keys[asked])).astype(np.int64)
        targets = np.concatenate((np.full_like(told, IGNORED), values[asked])).astype(np.int64)
        return tokens, targets


class Copy(Memorized):
    """Random symbols, a mark, and the same symbols again, which are to be answered.

    Args:
        symbols: Symbols in a sequence.
        alphabet: Different symbols there are.
        length, val_length, batch_size, seed, num_workers: See Recall.
    """

    def __init__(
        self,
        symbols: int = 32,
        alphabet: int = 32,
        length: int = 20_000,
        val_length: int = 1000,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        words = f"copies of {symbols} of {alphabet} symbols"
        super().__init__(words, alphabet + 1, length, val_length, batch_size, seed, num_workers)
        if symbols < 1 or alphabet < 2:
            raise ValueError(
                f"`symbols` is {symbols} and `alphabet` is {alphabet}, expected 1 and 2 or more: set them higher."
            )
        self.symbols, self.alphabet = symbols, alphabet

    def draw(self, drawn: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        text = drawn.integers(self.alphabet, size=self.symbols)
        tokens = np.concatenate((text, [self.alphabet], text[:-1])).astype(np.int64)
        targets = np.concatenate((np.full(self.symbols, IGNORED), text)).astype(np.int64)
        return tokens, targets

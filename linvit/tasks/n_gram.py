"""N-gram language models of words for decoding with a beam: read by kenlm, or counted in transcripts."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

START, END = "<s>", "</s>"


class NGram:
    """Natural logarithm of a word's probability after the words so far, from a KenLM file.

    Args:
        path: .arpa (may be .gz) or KenLM's binary form. Its words are spelled as those of the transcripts.

    Raises:
        ValueError: for a file that is missing or not a language model.
        ImportError: if kenlm is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import kenlm
        except ImportError as error:
            raise ImportError(
                "Language models are read by kenlm, which is not installed: pip install kenlm."
            ) from error
        if not Path(path).is_file():
            raise ValueError(f"There is no language model at {path}: give an .arpa file or one in KenLM's binary form.")
        try:
            self.model = kenlm.Model(str(path))
        except OSError as error:
            raise ValueError(
                f"{path} is not a language model: give an .arpa file or one in KenLM's binary form."
            ) from error
        self.new_state = kenlm.State
        start = kenlm.State()
        self.model.BeginSentenceWrite(start)
        self.states: dict[tuple[str, ...], Any] = {(): start}

    def __call__(self, before: tuple[str, ...], word: str) -> float:
        if before not in self.states:
            self(before[:-1], before[-1])
        after = self.new_state()
        score: float = self.model.BaseScore(self.states[before], word, after)
        self.states[(*before, word)] = after
        return score * math.log(10)


class CountedNGram:
    """Natural logarithm of a word's probability after the words so far, counted in texts; with Witten–Bell smoothing.

    After the n − 1 words h, for which the texts have c(h) continuations, k(h) of them different, a word w has the
    probability (c(h w) + k(h) p(w | h without its first word)) / (c(h) + k(h)). Below n = 1 it is uniform over the
    words of the texts, their end, and one for all unknown words. Needs memory for each different n-gram: for more than
    some million words, make an .arpa file with KenLM.

    Args:
        texts: the transcripts.
        order: the largest n.

    Source: Chen and Goodman, An empirical study of smoothing techniques for language modeling (1999), section 2.4.
    """

    def __init__(self, texts: Iterable[str], order: int = 3) -> None:
        self.padding = (START,) * (order - 1)
        counted: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for text in texts:
            words = (*self.padding, *text.split(), END)
            for place in range(order - 1, len(words)):
                for length in range(order):
                    counted[words[place - length : place]][words[place]] += 1
        self.counts = dict(counted)
        self.totals = {context: following.total() for context, following in counted.items()}
        self.vocabulary = len(counted[()]) + 1

    def __call__(self, before: tuple[str, ...], word: str) -> float:
        begun = (*self.padding, *before)
        probability = 1 / self.vocabulary
        for length in range(len(self.padding) + 1):
            context = begun[len(begun) - length :]
            if context not in self.counts:
                break
            following, total = self.counts[context], self.totals[context]
            probability = (following[word] + len(following) * probability) / (total + len(following))
        return math.log(probability)

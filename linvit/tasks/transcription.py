"""CTC decoding from logits to text, n-gram language models for it, and the word edits between texts."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linvit.files import explained

BLANK = 0
START = "▁"  # begins a word
LanguageModel = Callable[[tuple[str, ...], str], float]


def greedy(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """Greedy decoding: the most probable token of each frame, with repetitions merged and blanks removed.

    Args:
        logits: (batch, frames, tokens).
        lengths: int64 (batch,), frames of each utterance.
    """
    tokens = []
    for row, length in zip(logits.argmax(-1).cpu(), lengths.tolist(), strict=True):
        joined = torch.unique_consecutive(row[:length])
        tokens.append(joined[joined != BLANK].tolist())
    return tokens


def prefix_beam(
    logits: Tensor,
    beam: int,
    names: Sequence[str] = (),
    language_model: LanguageModel | None = None,
    weight: float = 0.5,
    bonus: float = 0.0,
) -> list[int]:
    """Prefix beam search: the most probable tokens of one utterance, summed over all alignments with its frames.

    Args:
        logits: (frames, tokens).
        beam: width of the beam: prefixes kept after each frame.
        names: of the tokens, for a language model.
        language_model: natural logarithm of a word's probability after the words so far; asked when a word ends.
        weight: of the language model's score.
        bonus: added for each word.

    Source: prefix search of CTC (arXiv 1408.2873).
    """
    scores = logits.double().log_softmax(-1).cpu()
    texts = _Texts(names, language_model, weight, bonus)
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}  # ends in a blank, or does not
    for frame in scores:
        likely = frame.topk(min(beam + 1, len(frame))).indices.tolist()
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-math.inf, -math.inf])
        for prefix, (blank, other) in beams.items():
            total = _added(blank, other)
            for token in {BLANK, *likely, *prefix[-1:]}:
                score = float(frame[token])
                if token == BLANK:
                    grown[prefix][0] = _added(grown[prefix][0], total + score)
                    continue
                longer = (*prefix, token)
                if prefix and token == prefix[-1]:
                    grown[prefix][1] = _added(grown[prefix][1], other + score)
                    grown[longer][1] = _added(grown[longer][1], blank + score)
                else:
                    grown[longer][1] = _added(grown[longer][1], total + score)
        best = sorted(grown, key=lambda prefix: -_added(*grown[prefix]) - texts.score(prefix))[:beam]
        beams = {prefix: (grown[prefix][0], grown[prefix][1]) for prefix in best}
    likeliest = max(beams, key=lambda prefix: _added(*beams[prefix]) + texts.score(prefix, whole=True))
    return list(likeliest)


class _Texts:
    """Language-model scores of prefixes: of complete words, and at the end of the text of the last word too."""

    def __init__(self, names: Sequence[str], language_model: LanguageModel | None, weight: float, bonus: float) -> None:
        self.names, self.model, self.weight, self.bonus = names, language_model, weight, bonus
        self.known: dict[tuple[str, ...], float] = {(): 0.0}

    def score(self, prefix: tuple[int, ...], whole: bool = False) -> float:
        if self.model is None and not self.bonus:
            return 0.0
        words = tuple(spelled(prefix, self.names).split())
        return self._of(words if whole else words[:-1])

    def _of(self, words: tuple[str, ...]) -> float:
        if words not in self.known:
            score = self.model(words[:-1], words[-1]) if self.model else 0.0
            self.known[words] = self._of(words[:-1]) + self.weight * score + self.bonus
        return self.known[words]


def _added(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def spelled(tokens: Sequence[int], names: Sequence[str]) -> str:
    """The text of tokens; "▁" begins a word."""
    return "".join(names[token] for token in tokens).replace(START, " ").strip()


def word_edits(reference: str, hypothesis: str) -> tuple[int, int]:
    """Word edits (substitutions, deletions, insertions) from reference to hypothesis, and words of the reference.

    Over many utterances the word error rate is the sum of the edits over the sum of the words.

    Raises ImportError if jiwer is not installed.
    """
    words = len(reference.split())
    if not words:
        return len(hypothesis.split()), 0
    with explained("Word error rates need jiwer: pip install 'linvit[train,speech]'.", ImportError, ImportError):
        from jiwer import process_words
    counted = process_words(reference, hypothesis)
    return counted.substitutions + counted.deletions + counted.insertions, words


class NGram:
    """Natural logarithm of a word's probability after the words so far, from a KenLM file.

    Args:
        path: .arpa (may be .gz) or KenLM's binary form. Its words are spelled as those of the transcripts.

    Raises:
        ValueError: for a file that is missing or not a language model.
        ImportError: if kenlm is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        missing = "Language models are read by kenlm, which is not installed: pip install kenlm."
        with explained(missing, ImportError, ImportError):
            import kenlm
        damaged = f"{path} is missing or no language model: give an .arpa file or one in KenLM's binary form."
        with explained(damaged, OSError):
            self.model = kenlm.Model(str(path))
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
        self.padding = ("<s>",) * (order - 1)
        counted: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for text in texts:
            words = (*self.padding, *text.split(), "</s>")
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

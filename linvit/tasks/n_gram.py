"""An n-gram language model of words, read by kenlm, for decoding with a beam."""

import math
from pathlib import Path
from typing import Any


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
        after = self.new_state()
        score: float = self.model.BaseScore(self._state(before), word, after)
        self.states[(*before, word)] = after
        return score * math.log(10)

    def _state(self, words: tuple[str, ...]) -> Any:
        if words not in self.states:
            self(words[:-1], words[-1])
        return self.states[words]

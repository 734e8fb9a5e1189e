"""Transcripts as tokens: words, characters or subwords. "▁" begins a word, and token 0 is the blank."""

from collections.abc import Iterable, Sequence

BLANK, START = "<blank>", "▁"
UNITS = ("words", "characters", "subwords")


def tokens_of(texts: Sequence[str], units: str, number: int) -> tuple[list[str], str]:
    """The names of all tokens, the blank first, and the subword tokenizer as JSON ("" for other units).

    Args:
        texts: the training transcripts.
        units: "words", "characters", or "subwords", byte pair encoding learned on the texts.
        number: number of subwords, including the blank.

    Raises ValueError for unknown units, texts without words, and fewer subwords than characters.
    """
    if units not in UNITS:
        raise ValueError(f"`units` is {units!r}, expected one of {', '.join(UNITS)}: choose a known one.")
    words = {word for text in texts for word in text.split()}
    if not words:
        raise ValueError("The training transcripts have no words: check their files.")
    if units == "words":
        return [BLANK, *(START + word for word in sorted(words))], ""
    characters = sorted({START} | {character for word in words for character in word})
    if units == "characters":
        return [BLANK, *characters], ""
    if number <= len(characters):
        raise ValueError(f"`num_tokens` is {number}, but the texts have {len(characters)} characters: set it higher.")
    return _learned(texts, characters, number)


def _learned(texts: Iterable[str], characters: Sequence[str], number: int) -> tuple[list[str], str]:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("Subwords need tokenizers: pip install 'linvit[train,speech]'.") from error
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=START, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=number, special_tokens=[BLANK], initial_alphabet=list(characters), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    number_of = tokenizer.get_vocab()
    return sorted(number_of, key=number_of.__getitem__), tokenizer.to_str()


class Speller:
    """Converts text to token numbers.

    Args:
        names: names of all tokens, the blank first.
        tokenizer: the subword tokenizer as JSON, "" for other units.
    """

    def __init__(self, names: Sequence[str], tokenizer: str = "") -> None:
        self.index = {name: number for number, name in enumerate(names)}
        self.tokenizer = None
        if tokenizer:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(tokenizer)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; unknown words or characters are left out."""
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(" ".join(text.split())).ids)
        return [self.index[unit] for unit in self.units(text) if unit in self.index]

    def units(self, text: str) -> list[str]:
        """The words of a text with "▁" before each, or the characters of that; those without a token too."""
        words = [START + word for word in text.split()]
        return [character for word in words for character in word] if START in self.index else words

"""`linvit generate`: a language model writes on, in constant time and memory a token where its attention is linear."""

import codecs
from collections.abc import Iterator, Sequence

import torch

from linvit.data import TextPreprocessing
from linvit.data.text.tokens import Bytes, Tokenizer
from linvit.models.sequence import generate
from linvit.runs.predict import ready_network
from linvit.runs.restore import Restored


def write_text(
    restored: Restored,
    prompt: str = "",
    tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    weights: str | None = None,
) -> Iterator[str]:
    """The prompt and what follows it, piece by piece, until the document ends or so many tokens are written.

    Bytes of the prompt that are no UTF-8 are read by networks of bytes as they are. Raises ValueError for a network
    that reads no text, for a seed of more than 64 bits, and as `generate`.
    """
    if not isinstance(restored.preprocessing, TextPreprocessing):
        raise ValueError(f"{restored.path} reads no text: give the run of a language model.")
    if tokens < 1:
        raise ValueError(f"--tokens is {tokens}, but at least one has to be written: set it to 1 or more.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed is {seed}, expected a whole number of 64 bits: choose a smaller one.")
    network, device = ready_network(restored, weights)
    tokenizer = restored.preprocessing.open()
    given = prompt.encode("utf-8", "surrogateescape")  # what a shell hands over, byte by byte
    start = torch.tensor([tokenizer.separator, *tokenizer.encode(given)], device=device)
    generator = torch.Generator().manual_seed(seed)
    written = generate(network, start, tokens, temperature, top_p, generator, stop=tokenizer.separator)  # type: ignore[arg-type]
    yield given.decode("utf-8", "replace")
    yield from pieces(tokenizer, written)


def pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens as they come; a character of several tokens comes when it is whole."""
    if isinstance(tokenizer, Bytes):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)
        return
    shown: list[int] = []  # the tokens of the last piece: spaces can depend on them
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = _after(tokenizer, shown, held)
        if not text.endswith("�"):
            yield text
            shown, held = held, []
    yield _after(tokenizer, shown, held)


def _after(tokenizer: Tokenizer, shown: Sequence[int], held: Sequence[int]) -> str:
    return tokenizer.decode([*shown, *held])[len(tokenizer.decode(shown)) :]

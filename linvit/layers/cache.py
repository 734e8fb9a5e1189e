"""What an attention keeps of the tokens read so far, for decoding."""

from dataclasses import dataclass

from torch import Tensor

from linvit.ops import State


class KeyValues:
    """Keys and values of all tokens read so far, in buffers that double in size when they are full."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values; returns all of them, each (batch, heads, tokens, width)."""
        end = self.length + key.shape[-2]
        if self.key is None or end > self.key.shape[-2]:
            grown = [x.new_empty(*x.shape[:2], 2 * end, x.shape[-1]) for x in (key, value)]
            for buffer, full in zip(grown, (self.key, self.value), strict=True):
                if full is not None:
                    buffer[:, :, : self.length] = full[:, :, : self.length]
            self.key, self.value = grown
        assert self.value is not None
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]

    def num_bytes(self) -> int:
        """Bytes of the tokens read, without the unused part of the buffers."""
        if self.key is None or self.value is None:
            return 0
        return sum(x[:, :, : self.length].numel() * x.element_size() for x in (self.key, self.value))


@dataclass
class AttentionCache:
    """All that one attention keeps; every field is None at first.

    read: the state of a linear mechanism, or the keys and values of softmax attention. conv, lepe: the last inputs of
    its two convolutions.
    """

    read: State | KeyValues | None = None
    conv: Tensor | None = None
    lepe: Tensor | None = None

    def num_bytes(self) -> int:
        """Size in bytes."""
        inputs = sum(x.nbytes for x in (self.conv, self.lepe) if x is not None)
        if isinstance(self.read, KeyValues):
            return inputs + self.read.num_bytes()
        return inputs + sum(x.nbytes for x in self.read or ())

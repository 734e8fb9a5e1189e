"""What the tasks of decoders share: the networks, their list, and the sections of their reports."""

from linvit.models.sequence import create_sequence
from linvit.runs.named import NamedSpec


class DecoderSpec(NamedSpec):
    """A task that trains a decoder of tokens."""

    create = staticmethod(create_sequence)
    instead_of_predict = "call `generate` or `evaluate`"

"""Decoders and Conformers as programs: a decoder's states are inputs and outputs."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from linvit.deploy.facts import SequenceFacts
from linvit.deploy.runtimes import Session
from linvit.layers.cache import AttentionCache, KeyValues
from linvit.layers.operator import Operator
from linvit.models.conformer import Conformer
from linvit.models.sequence import Decoder, DecoderCache
from linvit.ops import State

PER_TOKEN = ("key", "value")  # states with one entry per token, in their third dimension
POSITION = "position"  # the state of decoders that rotate: the number of tokens read
EXAMPLE = 70  # tokens or frames of the inputs to export with: more than a chunk
READ_FIRST = 2 / 3  # of the tokens of a comparison, then a few at once, then one by one


class Joined(KeyValues):
    """Keys and values in tensors of their length, because a program cannot write to a part of its inputs."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key, self.value, self.length = key, value, key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert self.key is not None
        assert self.value is not None
        self.key, self.value = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        self.length = self.key.shape[2]
        return self.key, self.value


def states_in(cache: DecoderCache) -> dict[str, Tensor]:
    """The tensors of a cache by name: layer0.S, layer0.z … layer1.S …; of softmax attention layer0.key and .value.

    In programs of decoders that rotate, the last one is `position`.
    """
    states: dict[str, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        fields: dict[str, Any] = {}
        if isinstance(layer.read, State):
            fields = layer.read._asdict()
        elif layer.read is not None:
            key, value = layer.read.key, layer.read.value
            assert key is not None
            assert value is not None
            fields = {"key": key[:, :, : layer.read.length], "value": value[:, :, : layer.read.length]}
        fields |= {"conv": layer.conv, "lepe": layer.lepe}
        # a convolution over one token keeps nothing
        states |= {f"layer{number}.{field}": x for field, x in fields.items() if x is not None and x.shape[1:2] != (0,)}
    position: Any = cache.tokens
    return states | ({POSITION: position} if isinstance(position, Tensor) else {})


def cache_of(states: Mapping[str, Tensor]) -> DecoderCache:
    """The cache of tensors from `states_in`, or of zeros before the first token."""
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, state in states.items():
        layer, _, field = name.partition(".")
        if name != POSITION:
            layers[layer][field] = state
    tokens: Any = states.get(POSITION, 0)
    return DecoderCache([_layer_cache(**fields) for fields in layers.values()], tokens)


def _layer_cache(conv: Tensor | None = None, lepe: Tensor | None = None, **fields: Tensor) -> AttentionCache:
    if "key" in fields:
        return AttentionCache(Joined(**fields), conv, lepe)
    state = State(**fields)
    lowest = torch.finfo(state.shift.dtype).min
    return AttentionCache(state._replace(shift=state.shift.masked_fill(state.n == 0, lowest)), conv, lepe)


def zeros(states: Mapping[str, Sequence[int]], batch: int, tokens: int = 0) -> dict[str, Tensor]:
    """The states before the first token, as the facts of a file describe them; with keys and values of `tokens`."""
    shapes = {name: [batch, *shape[1:]] for name, shape in states.items()}
    for name, shape in shapes.items():
        if name.endswith(PER_TOKEN):
            shape[2] = tokens
    return {name: torch.zeros(*shape) for name, shape in shapes.items()}


@torch.no_grad()
def state_shapes(network: Decoder) -> dict[str, list[int]]:
    """The shapes of a decoder's states for one sequence before its first token; 0 where they grow."""
    begun: Any = torch.zeros(1) if network.attentions[0].rope else 0
    cache = DecoderCache(tokens=begun)
    network.read(torch.zeros(1, 1, dtype=torch.long), cache)
    shapes = {name: list(state.shape) for name, state in states_in(cache).items()}
    for name, shape in shapes.items():
        if name.endswith(PER_TOKEN):
            shape[2] = 0
    return shapes


class WithStates(nn.Module):
    """A decoder from tokens and states to logits and the next states; names: of the states."""

    def __init__(self, network: Decoder, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self.names = network, tuple(names)

    def forward(self, tokens: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        cache = cache_of(dict(zip(self.names, states, strict=True)))
        logits = self.network.read(tokens, cache)
        return (logits, *states_in(cache).values())


class Unpadded(nn.Module):
    """A Conformer with head "ctc" on features (batch, frames, mels) without padding, to logits."""

    def __init__(self, network: Conformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        return (self.network(features)[0],)


def unfuse(network: nn.Module) -> None:
    """Lets softmax attention be computed as products: the views of fused attention hold for some sizes alone."""
    for module in network.modules():
        if isinstance(module, Operator):
            module.fused = False


def decoder_example(network: Decoder, facts: SequenceFacts) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """What is written of a decoder: the module, inputs for it, and the sizes that may change."""
    module = WithStates(network, list(facts.states))
    batch, tokens = (2, EXAMPLE) if facts.dynamic else (1, 1)
    states = zeros(facts.states, batch, tokens=5)
    inputs = (torch.zeros(batch, tokens, dtype=torch.long), *states.values())
    if not facts.dynamic:
        return module, inputs, None
    any_state = tuple(dict.fromkeys((0, 2) if name.endswith(PER_TOKEN) else (0,), Dim.DYNAMIC) for name in states)
    return module, inputs, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, any_state)


def conformer_example(network: Conformer) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """What is written of a Conformer, for any number of utterances and frames."""
    return Unpadded(network), (torch.zeros(2, EXAMPLE, network.mels),), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


@dataclass(frozen=True)
class DecoderFile:
    """The session of a decoder's file, which reads tokens after others."""

    facts: SequenceFacts
    session: Session

    def read(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """As Decoder.read."""
        if not self.facts.dynamic and len(tokens) > 1:
            raise ValueError(f"The file reads one sequence, but the batch has {len(tokens)}: give one at a time.")
        states = zeros(self.facts.states, len(tokens)) | states_in(cache)
        if POSITION in states:
            states[POSITION] = torch.full((len(tokens),), float(cache.tokens))
        logits = []
        for piece in (tokens,) if self.facts.dynamic else tokens.split(1, dim=1):
            answer, *after = self.session(piece, *(state.contiguous() for state in states.values()))
            states = dict(zip(states, after, strict=True))
            logits.append(answer)
        cache.layers = cache_of(states).layers
        cache.tokens += tokens.shape[1]
        return torch.cat(logits, dim=1)


def in_pieces(facts: SequenceFacts) -> Callable[[Session], Session]:
    """From a decoder's session to a function from whole rows of tokens to logits, which reads them as users do: many
    tokens at once, then a few, then one by one."""

    def whole(session: Session) -> Session:
        def logits(tokens: Tensor) -> tuple[Tensor]:
            cache, file = DecoderCache(), DecoderFile(facts, session)
            first = int(READ_FIRST * tokens.shape[1])
            pieces = (tokens[:, :first], tokens[:, first : first + 2], *tokens[:, first + 2 :].split(1, dim=1))
            return (torch.cat([file.read(piece, cache) for piece in pieces], dim=1),)

        return logits

    return whole

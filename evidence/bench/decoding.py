"""Text generation token by token: linear attention against softmax attention with its cache.

One sequence, mechanisms in turn. The memory of a row is the decoder's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from linvit.bench.clock import Call
from linvit.bench.exactness import TOLERANCES, check
from linvit.bench.machine import MEBIBYTE
from linvit.bench.options import Options as CommonOptions
from linvit.bench.page import ERROR, TIME, TOKENS, Cell, against, number
from linvit.bench.rows import Progress, Report, Row, Trial, growth, measure_groups
from linvit.layers.cache import KeyValues
from linvit.models.by_name import create
from linvit.models.sequence import Decoder, DecoderCache
from linvit.ranges import Count

BLOCK = 2048  # tokens of the context that are read at once
CHECKED = 48  # tokens after which a step is compared with the forward pass
VOCABULARY = 257
MECHANISM: dict[str, Cell] = {"mechanism": lambda row: row.name, "network": lambda row: row.variant}


def per_second(calls: int) -> Cell:
    """The cell of how many results a second come from so many calls each."""
    return lambda row: number(None if row.median_ms is None else 1000 / row.median_ms / calls)


COLUMNS: dict[str, Cell] = {
    **MECHANISM, **TOKENS, **TIME,
    "tokens/s": per_second(1), "× softmax": against("softmax"), **ERROR,
    "kept MiB": lambda row: number(row.peak_mib),
}  # fmt: skip


@dataclass(frozen=True)
class Options(CommonOptions):
    """Mechanisms in one decoder, and lengths of the context in tokens."""

    names: Sequence[str] = ("softmax", "linear", "mala", "rala")
    network: str = "sequence_nano"
    contexts: Sequence[Count] = (1024, 8192, 65_536)

    def __post_init__(self) -> None:
        for name in self.names:
            self.decoder(name, "meta")

    def decoder(self, mechanism: str, device: str) -> Decoder:
        """The network with a mechanism; raises ValueError for unknown names."""
        with torch.device(device):
            return cast(Decoder, create(self.network, VOCABULARY, family="sequence", mechanism=mechanism))

    def least_bytes(self) -> int:
        """The tokens of the context, and with softmax attention their keys and values."""
        context = max(self.contexts, default=0)
        if "softmax" not in self.names:
            return 8 * context
        decoder = self.decoder("softmax", "meta")
        return 2 * 4 * decoder.width * len(decoder.blocks) * context


@torch.inference_mode()
def measure(options: Options, report: Report, progress: Progress) -> None:
    """Checks a step of every mechanism against the forward pass, then times one token after every context."""
    torch.manual_seed(options.seed)
    networks = {name: options.decoder(name, "cpu").eval().to(options.device) for name in options.names}
    errors = {name: _error(name, network, options.device) for name, network in networks.items()}

    def trial(name: str, context: int) -> Trial:
        memory = filled(networks[name], context)
        row = Row(name, options.network, "float32", 1, options.threads, "token", tokens=context, error=errors[name])
        row.peak_mib = memory.num_bytes() / MEBIBYTE
        return Trial(row, name, make=lambda: step(networks[name], memory), rivals={"softmax": "softmax"})

    groups = (
        (f"{options.network} after {context:,} tokens", (trial(name, context) for name in networks))
        for context in options.contexts
    )
    measure_groups(groups, replace(options, memory=False), report, progress, graphs=False)
    report.findings["growth"] = growth(report.rows)


def _error(name: str, network: Decoder, device: str) -> float:
    tokens = torch.randint(VOCABULARY, (1, CHECKED + 1), device=device)
    memory = DecoderCache()
    network.read(tokens[:, :-1], memory)
    got = network.read(tokens[:, -1:], memory)[:, -1]
    label = f"a step of the decoder with {name}"
    return check(label, (got,), (network(tokens)[:, -1],), 10 * TOLERANCES[torch.float32])


def filled(network: Decoder, context: int) -> DecoderCache:
    """The cache of a decoder after this many tokens.

    They are read by linear mechanisms; keys and values of softmax attention are random, because reading takes time
    quadratic in them, and generating costs the same whatever they are.
    """
    device = next(network.parameters()).device
    memory = DecoderCache()
    network.read(torch.randint(VOCABULARY, (1, min(4, context)), device=device), memory)
    if not any(isinstance(layer.read, KeyValues) for layer in memory.layers):
        rest = torch.randint(VOCABULARY, (1, context - memory.tokens), device=device)
        for block in rest.split(BLOCK, dim=1) if rest.numel() else ():
            network.read(block, memory)
        return memory
    for layer in memory.layers:
        cache = cast(KeyValues, layer.read)
        keys = cast(torch.Tensor, cache.key)
        more = keys.new_empty(*keys.shape[:2], context - cache.length, keys.shape[-1])
        cache.append(more.normal_(), torch.randn_like(more))
    memory.tokens = context
    return memory


def step(network: Decoder, memory: DecoderCache) -> Call:
    """A call that reads one more token; the cache stays as long as it is."""
    token = torch.zeros(1, 1, dtype=torch.long, device=next(network.parameters()).device)
    context = memory.tokens

    def read() -> tuple[torch.Tensor]:
        logits = network.read(token, memory)
        memory.tokens = context
        for layer in memory.layers:
            if isinstance(layer.read, KeyValues):
                layer.read.length = context
        return (logits,)

    return read

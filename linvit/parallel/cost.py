"""What sharing an image costs: the bytes that were sent, and a projection to other numbers of processes."""

import statistics
import time
from typing import NamedTuple

import torch

from linvit.parallel.exchange import Exchange
from linvit.parallel.sharded import Sharded

LARGE, ROUNDS = 1 << 22, 9


class Link(NamedTuple):
    """What a message between two processes takes: seconds, plus its bytes over bytes per second."""

    seconds: float
    rate: float


class Traffic(NamedTuple):
    """What a process with two neighbours sends in one forward pass, and in how many messages.

    halo: to both neighbours, the same for any number of processes. state: to each of the other processes.
    """

    halo_bytes: int
    halo_messages: int
    state_bytes: int
    state_messages: int


def traffic(sharded: Sharded) -> Traffic:
    """The traffic counted since `exchange.clear()`, if that was one forward pass of a process with two neighbours."""
    halos = {name for name, _, _ in sharded.layout.halos}
    exchange, others = sharded.exchange, sharded.exchange.number - 1
    counts = [
        sum(number for name, number in counter.items() if (name in halos) == is_halo)
        for is_halo in (True, False)
        for counter in (exchange.sent, exchange.messages)
    ]
    return Traffic(counts[0], counts[1], counts[2] // others, counts[3] // others)


def measured_link(exchange: Exchange, device: torch.device | None = None) -> Link:
    """The link between the processes of an exchange, from the median time of small and large messages."""
    medians = []
    for size in (1, LARGE):
        message, times = torch.zeros(size, device=device), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            exchange.gather(message, "link")[-1, -1].item()
            times.append((time.perf_counter() - start) / (exchange.number - 1))
        medians.append(statistics.median(times))
    small, large = medians
    return Link(small, 4 * LARGE / max(large - small, 1e-9))


def projected_seconds(compute: float, sent: Traffic, link: Link, processes: int) -> float:
    """A projection, no measurement: the seconds of one forward pass over so many processes.

    Assumes that the computation divides evenly and that nothing is sent while something is computed.

    Args:
        compute: seconds in one process.
        sent: for this image; halo bytes grow with its width, the other numbers do not change.
        link: as measured between processes.
        processes: their number.
    """
    if processes == 1:
        return compute
    halo = sent.halo_messages * link.seconds + sent.halo_bytes / link.rate
    states = (processes - 1) * (sent.state_messages * link.seconds + sent.state_bytes / link.rate)
    return compute / processes + halo + states


def ring_attention_bytes(tokens: int, width: int, processes: int, itemsize: int = 4) -> int:
    """What a process sends in ring attention of one layer: the keys and values of its tokens, to all others in turn."""
    return 2 * tokens * width * itemsize * (processes - 1) // processes

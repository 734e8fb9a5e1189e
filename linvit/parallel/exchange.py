"""What the processes of a group send each other for one image, and how many bytes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup

from linvit.ops import State
from linvit.ops.state import joined, joined_means


class LostProcessError(ConnectionError):
    """Another process ended or cannot be reached."""


class Exchange:
    """The links between the processes of a group, which stand below each other in the order of their ranks.

    Every process makes the same calls in the same order, forward and backward; gradients are of the sum of all
    processes' losses.

    Attributes:
        rank, number: of this process, and the number of processes.
        sent, messages: bytes that this process has sent, and in how many messages, by the name of the layer; a new
            count begins after `clear()`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.number = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def clear(self) -> None:
        """Begins to count again."""
        self.sent.clear()
        self.messages.clear()

    def count(self, name: str, bytes_sent: int, messages: int) -> None:
        """Adds what the layer of that name has sent."""
        self.sent[name] += bytes_sent
        self.messages[name] += messages

    def gather(self, x: Tensor, name: str) -> Tensor:
        """The tensors of all processes, which have one shape: (processes, …)."""
        return _Gather.apply(x, self, name)

    def with_halo(self, x: Tensor, halo: tuple[int, int, int], name: str) -> Tensor:
        """A tensor (…, rows, width) with rows of the processes above and below it.

        halo: the number of rows from above, which are zeros in the first process; of rows from below; and of zeros in
        their place in the last process.
        """
        return _Halo.apply(x, halo, self, name)

    def send(self, up: Tensor, down: Tensor, above: Tensor, below: Tensor, name: str) -> None:
        """Sends `up` to the process above and `down` to that below; fills `above` and `below` with what they send."""
        operations, received = [], []
        for peer, outgoing, incoming in ((self.rank - 1, up, above), (self.rank + 1, down, below)):
            if not 0 <= peer < self.number:
                continue
            if outgoing.numel():
                self.count(name, outgoing.nbytes, 1)
                operations.append(P2POp(dist.isend, outgoing.contiguous(), group=self.group, group_peer=peer))
            if incoming.numel():
                received.append((incoming, torch.empty_like(incoming, memory_format=torch.contiguous_format)))
                operations.append(P2POp(dist.irecv, received[-1][1], group=self.group, group_peer=peer))
        with _reached(self):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        for incoming, buffer in received:
            incoming.copy_(buffer)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, name: str) -> Tensor:
        ctx.exchange, ctx.name = exchange, name
        out = x.new_empty(exchange.number, *x.shape)
        exchange.count(name, (exchange.number - 1) * x.nbytes, exchange.number - 1)
        with _reached(exchange):
            dist.all_gather(list(out), x.contiguous(), group=exchange.group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, total = ctx.exchange, grad.clone(memory_format=torch.contiguous_format)
        exchange.count(ctx.name, 2 * (exchange.number - 1) * total[0].nbytes, 2 * (exchange.number - 1))
        with _reached(exchange):
            dist.all_reduce(total, group=exchange.group)
        return total[exchange.rank], None, None


class _Halo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: tuple[int, int, int], exchange: Exchange, name: str) -> Tensor:
        ctx.halo, ctx.exchange, ctx.name = halo, exchange, name
        (above, below, zeros), rows = halo, x.shape[-2]
        out = F.pad(x, (0, 0, above, zeros if exchange.rank == exchange.number - 1 else below))
        exchange.send(
            up=x.narrow(-2, 0, below),
            down=x.narrow(-2, rows - above, above),
            above=out.narrow(-2, 0, above),
            below=out.narrow(-2, above + rows, out.shape[-2] - above - rows),
            name=name,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, (above, below, zeros) = ctx.exchange, ctx.halo
        last = exchange.rank == exchange.number - 1
        rows = grad.shape[-2] - above - (zeros if last else below)
        out = grad.narrow(-2, above, rows).clone()
        of_above, of_below = torch.zeros_like(out.narrow(-2, 0, below)), torch.zeros_like(out.narrow(-2, 0, above))
        exchange.send(
            up=grad.narrow(-2, 0, above),
            down=grad.narrow(-2, above + rows, grad.shape[-2] - above - rows),
            above=of_above,
            below=of_below,
            name=ctx.name,
        )
        out.narrow(-2, 0, below).add_(of_above)
        out.narrow(-2, rows - above, above).add_(of_below)
        return out, None, None, None


class ProcessShard:
    """The tokens of one process for the attention of one layer, see `linvit.ops.state.Shard`.

    num_prefix: tokens before the grid, such as a class token: every process has them, they count in the first.
    """

    def __init__(self, exchange: Exchange, name: str, num_prefix: int, device: torch.device) -> None:
        self.exchange, self.name, self.num_prefix, self.device = exchange, name, num_prefix, device

    def visible(self, tokens: int) -> Tensor | None:
        if self.num_prefix == 0 or self.exchange.rank == 0:
            return None
        return torch.arange(tokens, device=self.device) >= self.num_prefix

    def mean(self, mean: Tensor, count: Tensor, *, before: bool) -> tuple[Tensor, Tensor]:
        packed = self.exchange.gather(torch.cat((mean, count.unsqueeze(-1)), -1), self.name)
        means, counts = packed[..., :-1], packed[..., -1] * self._counted(before).view(-1, 1, 1).to(packed)
        return joined_means(means, counts), counts.sum(0)

    def state(self, state: State, *, before: bool) -> State:
        fields = [field.flatten(2) if field.dim() > 2 else field.unsqueeze(2) for field in state]
        packed = self.exchange.gather(torch.cat(fields, -1), self.name)
        split = packed.split([field.shape[-1] for field in fields], -1)
        every = State(*(x.reshape(-1, *field.shape) for x, field in zip(split, state, strict=True)))
        if before:  # every process needs the gradients of all others, so a later state is emptied, not left out
            emptied = every._replace(n=0 * every.n, shift=0 * every.shift + torch.finfo(packed.dtype).min)
            earlier = self._counted(before).view(-1, 1, 1)
            n, shift = (torch.where(earlier, *pair) for pair in ((every.n, emptied.n), (every.shift, emptied.shift)))
            every = every._replace(n=n, shift=shift, num_queries=every.num_queries * earlier)
        return reduce(joined, (State(*fields) for fields in zip(*every, strict=True)))

    def _counted(self, before: bool) -> Tensor:
        """Which processes are asked for, bool (processes,)."""
        ranks = torch.arange(self.exchange.number, device=self.device)
        return ranks < (self.exchange.rank if before else self.exchange.number)


def lost_process(error: BaseException) -> bool:
    """Whether an error of torch says that another process ended or cannot be reached.

    Gloo has no exception of its own, only its source files' names in the text.
    """
    known = dist.is_available() and isinstance(error, dist.DistError | LostProcessError)
    return known or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


@contextmanager
def _reached(exchange: Exchange) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not lost_process(error):
            raise
        raise LostProcessError(
            f"Another of the {exchange.number} processes that share an image ended or cannot be reached, so process"
            f" {exchange.rank} stopped too: start all of them again."
        ) from error

"""The training of students: steps with AdamW by a rate that rises and falls."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")


def steps(
    learned: Iterable[nn.Parameter], batches: Iterable[Batch], loss: Callable[[Batch], Tensor], count: int, rate: float
) -> Iterator[tuple[Batch, float]]:
    """Trains the parameters in place, one step for each of `count` batches; gives the batch and its loss after each."""
    learned = list(learned)
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=count + 1, pct_start=0.1)
    for batch in batches:
        value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        torch.clear_autocast_cache()  # of the weights before this step
        schedule.step()
        yield batch, value.item()

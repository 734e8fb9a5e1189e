"""Next-token prediction: cross entropy, bits per byte of text, and accuracy on the tokens asked for."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

from linvit.errors import SettingError
from linvit.tasks.measures import LOSS, Measure, counted
from linvit.tasks.task import Task, exact_sum

IGNORED = -100
Targets = dict[str, Tensor]


class Language(Task):
    """Trains a decoder to predict the next token.

    Args:
        network: Maps tokens (batch, tokens) and the numbers of their documents to logits of the next tokens.
        kwargs: Further arguments of Task.

    bits_per_byte is the code length of all held-out text, document ends included, divided by its bytes;
    perplexity is per token; next_accuracy is the share of tokens that the network ranked first.
    """

    measures: Mapping[str, Measure] = {
        "bits_per_byte": Measure("bits per byte", "number", lower_is_better=True, panel="bits per byte"),
        "perplexity": Measure("perplexity", "number", lower_is_better=True),
        "next_accuracy": Measure("next-token accuracy", panel="accuracy"),
        **LOSS,
        **counted("bytes"),
    }
    score = "bits_per_byte"
    headline: tuple[str, ...] = ("bits_per_byte", "next_accuracy")
    counted = "bytes"

    def __init__(self, network: nn.Module, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.keep(lambda: {name: exact_sum() for name in ("nats", "tokens", "right")})

    def configure_model(self) -> None:
        """Shards the network's weights block by block if the trainer's strategy is ModelParallelStrategy."""
        if self.device_mesh is None or isinstance(self.network, FSDPModule):
            return
        if self.ema:
            raise SettingError("`ema_decay` is not available for sharded weights: leave it out.")
        mesh = self.device_mesh["data_parallel"]
        for block in getattr(self.network, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.network(tokens, documents)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens, targets["documents"])
        return self.learn(cross_entropy(logits.flatten(0, 1).float(), targets["targets"].flatten()), len(tokens))

    def validation_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> None:
        tokens, targets = batch
        self.count.update(self.counts(tokens, targets))
        asked = targets["targets"] != IGNORED
        wanted = targets["targets"][asked]
        for kind, network in self.networks().items():
            logits = network(tokens, targets["documents"])[asked].float()
            sums = self.kept(kind)
            sums["nats"].update(cross_entropy(logits, wanted, reduction="none").double().sum())
            sums["tokens"].update(len(wanted))
            sums["right"].update((logits.argmax(-1) == wanted).sum())

    def counts(self, tokens: Tensor, targets: Targets) -> Tensor:
        """The number of samples that `linvit eval` reports: bytes."""
        return targets["bytes"].sum()

    def measured(self, kind: str) -> dict[str, float]:
        nats, tokens, right = (total.compute().item() for total in self.kept(kind).values())
        count = self.count.compute().item()
        perplexity = math.exp(min(nats / tokens, 700))
        per_token = {"loss": nats / tokens, "perplexity": perplexity, "next_accuracy": right / tokens}
        return per_token | ({"bits_per_byte": nats / math.log(2) / count} if count else {})


class Recall(Language):
    """Trains a decoder on sequences with targets at some tokens only; recall_accuracy is the share predicted correctly.

    Args:
        network, kwargs: See Language.
    """

    measures: Mapping[str, Measure] = {
        "recall_accuracy": Measure("recall accuracy", panel="accuracy"),
        **LOSS,
        **counted("sequences"),
    }
    score = "recall_accuracy"
    headline: tuple[str, ...] = ("recall_accuracy",)
    counted = "sequences"

    def counts(self, tokens: Tensor, targets: Targets) -> Tensor:
        """The number of samples that `linvit eval` reports: sequences."""
        return torch.tensor(len(tokens), device=tokens.device)

    def measured(self, kind: str) -> dict[str, float]:
        measured = super().measured(kind)
        return {"loss": measured["loss"], "recall_accuracy": measured["next_accuracy"]}

"""A causal decoder with softmax, vanilla linear, MALA or RALA attention, for language and other tokens.

Paper: *Rectifying Magnitude Neglect in Linear Attention* (MALA, ICCV 2025, arXiv 2507.00698), Table 6, which compares
0.3 B models in the setting of gated linear attention (arXiv 2312.06635): 24 layers of 1,024 channels, SwiGLU, tied
embeddings of 32,000 tokens, 15 B tokens of text in contexts of 2,048. The paper does not say how positions are encoded
or whether the gate φ(x) stays, and its released code has no language model. We use a short convolution of q, k and v,
no rotation and no gate, so that every mechanism has 341 M parameters. In MALA the similarity of token i is divided by
i·√width, the causal form of the released code's N·√width. RALA's weights come from the queries so far and are fixed
once a token is read (weighting "prefix_query_mean").

| name | channels | layers | heads | hidden | parameters, with the usual vocabulary |
|---|---:|---:|---:|---:|---:|
| sequence_nano | 128 | 4 | 4 | 352 | 0.8 M, 257 tokens (bytes) |
| sequence_340m | 1,024 | 24 | 16 | 2,816 | 341 M, 32,000 tokens |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from linvit.errors import SettingError
from linvit.layers.cache import AttentionCache
from linvit.layers.causal import FORMS, CausalAttention, CausalConv, DecoderBlock, Packing
from linvit.layers.checks import (
    Depth,
    Device,
    Dtype,
    TensorOptions,
    check_filled,
    check_whole_numbers,
    multiple_of_heads,
)
from linvit.ops import Rotary, rotary_1d
from linvit.ranges import Amount, Checked, Count, Range, check, lookup

SIZES: Mapping[str, dict[str, int]] = {
    "sequence_nano": {"width": 128, "depth": 4, "heads": 4, "hidden": 352},
    "sequence_340m": {"width": 1024, "depth": 24, "heads": 16, "hidden": 2816},
}


SAMPLING = {
    "tokens": Amount,
    "temperature": Annotated[float, Range(0)],
    "top_p": Annotated[float, Range(above=0, most=1)],
}


@dataclass
class DecoderCache:
    """All that a decoder keeps of the tokens it has read: one cache per layer, and their number.

    tokens: in exported programs of decoders that rotate a tensor (batch,), because the sequences of a batch may differ.
    """

    layers: list[AttentionCache] = field(default_factory=list)
    tokens: int = 0

    def num_bytes(self) -> int:
        """Size in bytes."""
        return sum(layer.num_bytes() for layer in self.layers)


class Decoder(Checked, nn.Module):
    """Tokens in, logits of each next token out.

    Args:
        vocabulary: number of different tokens.
        width, depth, heads, hidden: channels, layers, heads, and hidden channels of the feed-forward.
        mechanism: a name in MECHANISMS that can be used for sequences.
        conv, lepe, modulation, rope: of every layer, see CausalAttention.

    Raises ValueError for an argument outside its range, and for sizes that do not fit together.
    """

    def __init__(
        self,
        vocabulary: Count,
        width: Count,
        depth: Depth,
        heads: Count,
        hidden: Count,
        mechanism: str = "mala",
        conv: Amount = 4,
        lepe: Amount = 0,
        modulation: str = "none",
        rope: bool = False,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        dd: TensorOptions = {"device": device, "dtype": dtype}
        options = {"conv": conv, "lepe": lepe, "modulation": modulation, "rope": rope}
        self.vocabulary, self.width, self.mechanism = vocabulary, width, mechanism
        self.head_width = multiple_of_heads(width, heads)
        self.embed = nn.Embedding(vocabulary, width, **dd)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, mechanism, hidden, options, **dd) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6, **dd)
        self.first_position = 0  # of the tokens, while the network reads only some of them
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 0.64/√width, 0.02 for 1,024 channels; convolutions are the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.64 * self.width**-0.5)
            elif isinstance(module, CausalConv):
                module.reset_parameters()

    @property
    def attentions(self) -> list[CausalAttention]:
        """The attention of every layer."""
        return [cast(DecoderBlock, block).attn for block in self.blocks]

    def forward(self, tokens: Tensor, documents: Tensor | None = None, form: str = "chunked") -> Tensor:
        """Logits (batch, tokens, vocabulary) of the token after each token of complete rows.

        Args:
            tokens: int64 (batch, tokens), 0 … vocabulary - 1.
            documents: int64 (batch, tokens), the number of each token's document if a row has several, which do not
                see each other; padding is a separate document.
            form: "chunked", linear in the tokens for linear mechanisms, or "matrix", with the explicit scores.

        Raises TypeError or ValueError for tokens or documents of the wrong type, shape or range, and an unknown form.
        """
        lookup("form", form, dict.fromkeys(FORMS))
        self._check(tokens)
        if documents is not None:
            check_whole_numbers("documents", documents, tuple(tokens.shape), -(2**63), 2**63 - 1)
        packing = None
        if documents is not None and bool((documents[:, 1:] != documents[:, :-1]).any()):
            packing = Packing(documents)
        x = self.embed(tokens)
        rotary = self._rotary(packing.shape[1] if packing else tokens.shape[1], self.first_position, x)
        for block in self.blocks:
            x = block(x, rotary, packing, None, form)
        return linear(self.norm(x), self.embed.weight)

    def read(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """As forward, for the tokens after those in `cache`, which is updated; start with `DecoderCache()`."""
        self._check(tokens)
        if not cache.layers:
            cache.layers = [AttentionCache() for _ in self.blocks]
        x = self.embed(tokens)
        rotary = self._rotary(tokens.shape[1], cache.tokens, x)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, rotary, None, layer)
        cache.tokens = cache.tokens + tokens.shape[1]
        return linear(self.norm(x), self.embed.weight)

    def _check(self, tokens: Tensor) -> None:
        check_whole_numbers("tokens", tokens, ("batch", "tokens"), 0, self.vocabulary - 1)
        check_filled("tokens", tokens)

    def _rotary(self, tokens: int, start: int | Tensor, x: Tensor) -> Rotary | None:
        if not self.attentions[0].rope:
            return None
        return rotary_1d(tokens, self.head_width, start=start, dtype=x.dtype, device=x.device)


def generate(
    network: Decoder,
    prompt: Tensor,
    tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields the tokens that follow a prompt, one by one, as they are generated.

    Args:
        network: in evaluation mode.
        prompt: int64 (tokens,), at least one.
        tokens: maximum number of tokens.
        temperature: divides the logits; 0 is greedy decoding.
        top_p: nucleus sampling: keep the most likely tokens up to this total probability.
        generator: random number generator, on the CPU.
        stop: token that ends the text; it is not yielded.

    Raises TypeError or ValueError for an empty prompt or one of the wrong type, shape or range, and for numbers outside
    their ranges; raised by the call, before anything is generated.
    """
    check(SAMPLING, {"tokens": tokens, "temperature": temperature, "top_p": top_p})
    if isinstance(prompt, Tensor) and prompt.numel() == 0:
        raise SettingError("`prompt` is empty, expected one token or more")
    check_whole_numbers("prompt", prompt, ("tokens",), 0, network.vocabulary - 1)

    @torch.inference_mode()
    def generated() -> Iterator[int]:
        cache = DecoderCache()
        logits = network.read(prompt[None], cache)[0, -1]
        for _ in range(tokens):
            token = _sampled(logits.float().cpu(), temperature, top_p, generator)
            if token == stop:
                return
            yield token
            logits = network.read(torch.tensor([[token]], device=prompt.device), cache)[0, -1]

    return generated()


def _sampled(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    scaled = logits / temperature if temperature else logits
    if temperature == 0 or scaled.isinf().any():  # a temperature near 0 overflows: greedy
        return int(logits.argmax())
    probabilities, order = scaled.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0)
    return int(order[torch.multinomial(kept, 1, generator=generator)])

"""Records the inputs and outputs of each attention of a network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linvit.arguments import check_dense, check_network
from linvit.errors import SettingError
from linvit.formulas.feature_map import query_and_key_map
from linvit.layers.attention import Attention2d, tokens_of_map
from linvit.layers.mixer import ValueAttention
from linvit.layers.operator import NO_SCORES, AttentionLayer, in_heads, merged, rotated, shared_out, softmax_scores
from linvit.layers.token_attention import TokenAttention
from linvit.ops import Rotary, attention_scores
from linvit.ops.position import rotate
from linvit.ops.state import Weights, accumulator_dtype, summarize, token_weights
from linvit.ranges import OneOf, check

Inputs = Tensor | tuple[Tensor, ...]
MIXED, LOCAL, MODULATED = "mixed", "local", "modulated"
KINDS = (Attention2d, ValueAttention, TokenAttention, Attention)
"""The kinds of attention modules that can be analyzed."""


@dataclass(frozen=True)
class Operands:
    """What one attention operator read.

    query, key, value: (batch, heads, tokens, width), before feature map and rotation.
    options: of `linear_attention`; None for softmax attention and a nonlinear read.
    rotary, cu_seqlens: as in `linear_attention`. shares, nonlinear: see Operator.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any] | None
    rotary: Rotary | None = None
    shares: tuple[float, float] = (1.0, 0.0)
    cu_seqlens: Tensor | None = None
    nonlinear: bool = False

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, queries, tokens); ValueError for a nonlinear read."""
        self.check_linear()
        if self.options is None:
            scores = softmax_scores(*rotated(self.query, self.key, self.rotary))
        else:
            options = {**self.options, "rotary": self.rotary, "cu_seqlens": self.cu_seqlens}
            scores = attention_scores(self.query, self.key, **options)
        return shared_out(scores, self.shares)

    def check_linear(self) -> None:
        """Raises ValueError for a nonlinear read."""
        if self.nonlinear:
            raise ValueError(NO_SCORES)


@dataclass(frozen=True)
class Probe:
    """One attention layer on one batch of images.

    features: the output after each step that the layer has, "mixed" (the operator), "local" (+ LePE or another local
    term) and "modulated" (× φ(x)), each (batch, heads, tokens, width); Hydra's channels are grouped into the layer's
    number of heads. grid: (height, width) of the tokens that follow the first num_prefix, which are
    class tokens.
    """

    name: str
    mechanism: str
    operands: Operands
    features: dict[str, Tensor]
    grid: tuple[int, int]
    num_prefix: int = 0

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, tokens, tokens)."""
        return self.operands.scores()

    def outputs(self) -> Tensor:
        """The output of the operator, before the local term and the gate, (batch, heads, tokens, width)."""
        return self.features[MIXED]

    def kv_state(self) -> Tensor:
        """Σ_j α_j Rκ(k_j) ⊗ v_j in the heads of the features, see `kv_state`; Hydra's is diagonal."""
        state, heads = kv_state(self.operands), self.features[MIXED].shape[1]
        return state if state.shape[1] == heads else state.flatten(1).unflatten(1, (heads, -1)).diag_embed()


def mapped(operands: Operands) -> tuple[Tensor, Tensor, Weights]:
    """κ(q), κ(k) and the weights of the tokens of linear attention, float32 (float64 for float64 operands)."""
    options = operands.options or {}
    query_map, key_map = query_and_key_map(options.get("feature_map", "elu1"), every_token_counts=True)
    dtype = accumulator_dtype(operands.query.dtype)
    query, key = query_map(operands.query.to(dtype)), key_map(operands.key.to(dtype))
    return query, key, token_weights(options.get("weighting", "uniform"), query, key, None)


def kv_state(operands: Operands) -> Tensor:
    """Σ_j α_j Rκ(k_j) ⊗ v_j, what every query reads, (batch, heads, width, value width); RALA's KV buffer.

    Not centred, unlike `State.S`, and without the factor of the number of tokens, which does not change ranks.
    """
    operands.check_linear()
    if operands.options is None:
        raise ValueError("Softmax attention keeps no KV state: choose a layer with linear attention.")
    if "mixing" in operands.options:
        raise ValueError("Attention by blocks keeps a KV state for each block: choose a layer without blocks.")
    _, key, weights = mapped(operands)
    rotated = key if operands.rotary is None else rotate(key, operands.rotary)
    state = summarize(key, rotated, operands.value.to(key.dtype), weights)
    return state.S + state.r.unsqueeze(-1) * state.u.unsqueeze(-2)


@torch.no_grad()
def visit(
    network: nn.Module, inputs: Inputs, look: Callable[[Probe], None], layers: Sequence[str] | None = None
) -> None:
    """Run the network in eval mode and call `look` with a Probe of each attention layer, in order.

    Args:
        network: any network with attention of one of KINDS. For a detector, its backbone.
        inputs: the network's inputs: images (batch, channels, height, width), or a tuple of arguments, such as the
            images, times and labels of a DiT.
        look: called with one Probe per layer, as soon as the layer has run; the probe is not kept.
        layers: names of the layers to show, as in attention_layers; all by default.

    Raises ValueError if the network has no attention of these kinds or no layer of one of these names.
    """
    names = attention_layers(network)
    check(
        {"layers": Sequence[Annotated[str, OneOf(tuple(names))]] | None, "look": Callable},
        {"layers": layers, "look": look},
    )
    inputs = as_tuple(inputs)
    with ExitStack() as stack:
        stack.callback(network.train, network.training)
        for name in names if layers is None else sorted(set(layers), key=names.index):
            layer = network.get_submodule(name)
            if isinstance(layer, Attention):
                hook = partial(_look_at_timms, look, name, network, inputs[0])
                stack.callback(layer.register_forward_hook(hook).remove)
            else:
                _watch(stack, name, cast(AttentionLayer, layer), look)  # as the other KINDS are
        network.eval()(*inputs)


def probe(network: nn.Module, inputs: Inputs, layers: Sequence[str] | None = None) -> list[Probe]:
    """The probes of `visit` as a list; raises as `visit`."""
    probes: list[Probe] = []
    visit(network, inputs, probes.append, layers)
    return probes


def attention_layers(network: nn.Module) -> list[str]:
    """The names of the attention modules that can be analyzed, in the order of the network's modules."""
    check_network("network", network)
    names = [name for name, module in network.named_modules() if isinstance(module, KINDS)]
    if not names:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(
            f"{type(network).__name__} has no attention that can be analyzed, expected {kinds}: choose a RAVLT, MAViT, "
            "CARE, DeiT, DiT or swapped network"
        )
    return names


def unseen_attention(network: nn.Module) -> list[str]:
    """The kinds of attention modules in the network that cannot be analyzed, by class name."""
    classes = {type(module) for module in network.modules() if not isinstance(module, KINDS)}
    return sorted(kind.__name__ for kind in classes if "Attention" in kind.__name__ and "Block" not in kind.__name__)


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs of a network as a tuple of tensors that have a batch."""
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    for index, x in enumerate(tensors):
        name = f"inputs[{index}]" if isinstance(inputs, tuple) else "inputs"
        check_dense(name, x)
        if x.ndim == 0:
            raise SettingError(f"`{name}` has no axes, expected a batch")
    return tensors


def one_by_one(inputs: Inputs) -> Iterator[Inputs]:
    """The inputs of each image by itself; the batch is the first axis of every input."""
    for images in zip(*(x.split(1) for x in as_tuple(inputs)), strict=True):
        yield images if isinstance(inputs, tuple) else images[0]


def _watch(stack: ExitStack, name: str, layer: AttentionLayer, look: Callable[[Probe], None]) -> None:
    """Records what the operator of a layer reads, and the output after each step, until the stack is closed."""
    operator = layer.operator
    operands: list[Operands] = []
    features: dict[str, Tensor] = {}

    def read(_: nn.Module, inputs: tuple[Any, ...], given: Mapping[str, Any], mixed: Tensor) -> None:
        query, key, value, rotary = (*inputs, None)[:4]
        options = None if operator.options is None else operator.axes(key, given.get("feature_map"), given.get("grid"))
        query = operator.scaled(query) if options is None else query
        packed = given.get("cu_seqlens")
        operands.append(
            Operands(query, key, value, options, rotary, operator.shares, packed, nonlinear=operator.nonlinear)
        )
        features[MIXED] = in_heads(merged(mixed), layer.heads)

    def record(step: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(y: Tensor, *others: Any) -> Tensor:
            out = method(y, *others)
            if out is not y:
                by_head = out if isinstance(layer, TokenAttention) else tokens_of_map(out, layer.heads)
                features[step] = in_heads(merged(by_head), layer.heads)
            return out

        return recorded

    def finish(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        height, width = inputs[0].shape[-2:]
        num_prefix = 0
        if isinstance(layer, TokenAttention):
            height, width = (-(-side // layer.stride) for side in layer.last_grid.size or layer.grid)
            num_prefix = layer.num_prefix
        look(Probe(name, operator.mechanism, operands.pop(), dict(features), (height, width), num_prefix))
        features.clear()

    for step, method in ((LOCAL, "with_local"), (MODULATED, "gated")):
        if hasattr(layer, method):
            vars(layer)[method] = record(step, getattr(layer, method))
            stack.callback(vars(layer).pop, method)
    stack.callback(operator.register_forward_hook(read, with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(finish).remove)


def _look_at_timms(
    look: Callable[[Probe], None],
    name: str,
    network: nn.Module,
    images: Tensor,
    attention: Attention,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    x = inputs[0]
    num_prefix: int = getattr(network, "num_prefix_tokens", 0)
    embed = getattr(network, "patch_embed", None)
    size = (images.shape[-2], images.shape[-1])
    grid: tuple[int, int] = embed.dynamic_feat_size(size) if isinstance(embed, PatchEmbed) else (0, 0)
    if grid[0] * grid[1] + num_prefix != x.shape[1]:
        raise ValueError(
            f"The attention of this {type(network).__name__} got {x.shape[1]} tokens, but they are not a grid of"
            " patches: only a ViT that keeps all its patches can be analyzed."
        )
    query, key, value = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query, key = attention.q_norm(query), attention.k_norm(key)
    features = {MIXED: scaled_dot_product_attention(query, key, value)}
    if attention.gate is not None or not isinstance(attention.norm, nn.Identity):
        gate = 1.0 if attention.gate is None else attention.gate(x).sigmoid()
        features[MODULATED] = in_heads(attention.norm(merged(features[MIXED])) * gate, attention.num_heads)
    look(Probe(name, "softmax", Operands(query, key, value, None), features, grid, num_prefix))

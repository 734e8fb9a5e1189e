"""What goes into every attention of a network, and what becomes of it on the way out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, PatchEmbed
from torch import Tensor, nn

from linvit.layers.attention import Attention2d
from linvit.layers.axes import Axes, Operands
from linvit.layers.mixer import ValueAttention
from linvit.layers.token_attention import TokenAttention, merged
from linvit.ops import Rotary
from linvit.ops.feature_map import query_and_key_map
from linvit.ops.position import rotate
from linvit.ops.state import accumulator_dtype, summarize
from linvit.ops.weighting import Weights, token_weights

MIXED, LOCAL, MODULATED = "mixed", "local", "modulated"


@dataclass(frozen=True)
class Probe:
    """One attention at work on a batch of images.

    features: what the values have become after each step, "mixed" (the operator), "local" (+ LePE or another local
    term) and "modulated" (× φ(x)), as far as the layer has them, each (batch, heads, tokens, width), where Hydra's
    channels stand in the heads that the layer was asked for. grid: (height, width) of the tokens behind the first
    num_prefix, which are class tokens.
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
        """What the operator returns, before the local term and the modulation, (batch, heads, tokens, width)."""
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

    Not centred, unlike `State.S`, and without the factor of the number of tokens, which no rank depends on.

    Raises:
        ValueError: for softmax attention, which has no such state.
    """
    if operands.options is None:
        raise ValueError("Softmax attention keeps no KV state: ask for that of a linear attention.")
    _, key, weights = mapped(operands)
    rotated = key if operands.rotary is None else rotate(key, operands.rotary)
    state = summarize(key, rotated, operands.value.to(key.dtype), weights)
    return state.S + state.r.unsqueeze(-1) * state.u.unsqueeze(-2)


@torch.no_grad()
def visit(
    network: nn.Module, images: Tensor, look: Callable[[Probe], None], layers: Sequence[str] | None = None
) -> None:
    """Run the network in eval mode on images and show each attention to `look` as soon as it has worked, in order.

    Args:
        network: any network with attention of a kind in KINDS.
        images: (batch, channels, height, width).
        look: called with one Probe a layer, which is not kept afterwards.
        layers: names of the layers to show, as in attention_layers; all by default.

    Raises:
        ValueError: if the network has no attention of these kinds, or no layer of one of these names.
    """
    known = attention_layers(network)
    chosen = known if layers is None else _chosen(layers, known)
    handles = []
    for name in chosen:
        module = network.get_submodule(name)
        take = KINDS[_kind(module)]
        handles.append(module.register_forward_hook(_hook(name, take, look, network, images)))
    training = network.training
    try:
        network.eval()(images)
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()


def probe(network: nn.Module, images: Tensor, layers: Sequence[str] | None = None) -> list[Probe]:
    """All that `visit` shows, as a list; raises as `visit`."""
    probes: list[Probe] = []
    visit(network, images, probes.append, layers)
    return probes


def attention_layers(network: nn.Module) -> list[str]:
    """The names of the attention modules that can be looked at, in the order of the network's modules.

    Raises:
        ValueError: if there are none.
    """
    found = [name for name, module in network.named_modules() if _kind(module)]
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no attention to look at, expected {', '.join(k.__name__ for k in KINDS)}:"
            " choose a RAVLT, MAViT, CARE, DeiT or swapped network"
        )
    return found


def unseen_attention(network: nn.Module) -> list[str]:
    """The kinds of attention modules in the network that cannot be looked at, by class name."""
    classes = {type(module) for module in network.modules() if not _kind(module)}
    return sorted(kind.__name__ for kind in classes if "Attention" in kind.__name__ and "Block" not in kind.__name__)


def _chosen(layers: Sequence[str], known: list[str]) -> list[str]:
    for name in layers:
        if name not in known:
            raise ValueError(f"The network has no attention layer {name!r}, but {', '.join(known)}: choose among them.")
    return [name for name in known if name in layers]


def _kind(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in KINDS if isinstance(module, kind)), None)


def _hook(name: str, take: Callable[..., Probe], look: Callable[[Probe], None], network: nn.Module, images: Tensor):
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        look(take(name, module, args, network, images))

    return hook


def _take_attention2d(name: str, module: Attention2d, args: tuple[Tensor, ...], *_: Any) -> Probe:
    x, cos, sin = args
    maps = module.qkvo(x).chunk(4, dim=1)
    query, key, value, modulation = (_tokens(part, module.mix) for part in maps)
    operands = module.mix.operands(query, key, value, Rotary(cos, sin))
    features = {MIXED: operands.output()}
    features[LOCAL] = features[MIXED] + _tokens(module.lepe(maps[2]), module.mix)
    features[MODULATED] = features[LOCAL] * modulation
    return Probe(name, module.mix.mechanism, operands, features, tuple(x.shape[-2:]))


def _take_value_attention(name: str, module: ValueAttention, args: tuple[Tensor, ...], *_: Any) -> Probe:
    (x,) = args
    parts = (_tokens(part, module.mix) for part in (*module.qk(x).chunk(2, dim=1), x))
    operands = module.mix.operands(*parts, None)
    return Probe(name, module.mix.mechanism, operands, {MIXED: operands.output()}, tuple(x.shape[-2:]))


def _take_token_attention(name: str, module: TokenAttention, args: tuple[Tensor, ...], *_: Any) -> Probe:
    x, grid = args[0], module.last_grid.size
    operands = module.operands(x, grid)
    mixed = operands.output()
    local = module.with_local(mixed, operands, x, grid)
    modulated = module.modulated(local, x)
    features = {MIXED: mixed}
    if local is not mixed:
        features[LOCAL] = local
    if modulated is not local:
        features[MODULATED] = modulated
    features = {step: merged(y).unflatten(-1, (module.heads, -1)).transpose(1, 2) for step, y in features.items()}
    return Probe(name, module.mix.mechanism, operands, features, grid, module.num_prefix)


def _take_timm_attention(
    name: str, module: Attention, args: tuple[Tensor, ...], network: nn.Module, images: Tensor
) -> Probe:
    x = args[0]
    query, key, value = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    operands = Operands(module.q_norm(query), module.k_norm(key), value, None)
    grid, num_prefix = _token_grid(network, images, x.shape[1])
    return Probe(name, "softmax", operands, {MIXED: operands.output()}, grid, num_prefix)


def _token_grid(network: nn.Module, images: Tensor, tokens: int) -> tuple[tuple[int, int], int]:
    """Height and width in tokens of a timm ViT's images, and how many tokens stand before them."""
    num_prefix = getattr(network, "num_prefix_tokens", 0)
    embed = getattr(network, "patch_embed", None)
    grid = tuple(embed.dynamic_feat_size(tuple(images.shape[-2:]))) if isinstance(embed, PatchEmbed) else (0, 0)
    if grid[0] * grid[1] + num_prefix != tokens:
        raise ValueError(
            f"The attention of this {type(network).__name__} got {tokens} tokens, but they are no grid of patches:"
            " only a ViT that keeps all its patches can be looked at."
        )
    return grid, num_prefix


def _tokens(x: Tensor, axes: Axes) -> Tensor:
    return x.unflatten(1, (axes.heads, -1)).flatten(-2).mT


KINDS: dict[type[nn.Module], Callable[..., Probe]] = {
    Attention2d: _take_attention2d,
    ValueAttention: _take_value_attention,
    TokenAttention: _take_token_attention,
    Attention: _take_timm_attention,
}
"""Each kind of attention module with the function that makes a Probe of it."""

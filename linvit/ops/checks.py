"""What the operator refuses, each in one sentence: what, got, expected, what to do."""

from torch import Tensor

from linvit.ops.position import Rotary
from linvit.ops.state import State, accumulator_dtype
from linvit.ops.weighting import WEIGHTINGS


def check_inputs(query: Tensor, key: Tensor, rotary: Rotary | None, causal: bool) -> None:
    """Raise ValueError unless query, key and rotary table fit together."""
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (batch, heads, tokens, width)")
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}, expected a floating-point dtype")
        if x.shape[-2] == 0:
            raise ValueError(f"{name} has no tokens: shape {tuple(x.shape)}")
    if query.shape[:2] != key.shape[:2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}, expected the same batch, heads and width"
        )
    if query.dtype != key.dtype:
        raise ValueError(f"query is {query.dtype} and key {key.dtype}, expected the same dtype; cast one of them")
    if causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"causal=True with {query.shape[-2]} queries and {key.shape[-2]} keys, expected as many queries as keys"
        )
    for name, x in (("query", query), ("key", key)):
        if rotary is not None and rotary.cos.shape[-2:] != (x.shape[-2], x.shape[-1] // 2):
            raise ValueError(
                f"rotary has tables of shape {tuple(rotary.cos.shape)}, expected (tokens, width / 2) = "
                f"({x.shape[-2]}, {x.shape[-1] // 2}) for the {name}; make it with rotary_1d or rotary_2d"
            )


def check_value(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless the value has the key's tokens and dtype."""
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value has shape {tuple(value.shape)} and key {tuple(key.shape)}, expected equal batch, heads and tokens"
        )
    if value.dtype != query.dtype:
        raise ValueError(f"query is {query.dtype} and value {value.dtype}, expected the same dtype; cast one of them")


def check_state(state: State, query: Tensor, value: Tensor, causal: bool) -> None:
    """Raise ValueError unless the state was made for such queries and values."""
    if not causal:
        raise ValueError(
            "state is given with causal=False; pass causal=True to go on from it, or join summaries with merge"
        )
    expected = (*query.shape[:2], query.shape[-1], value.shape[-1])
    if state.S.shape != expected or state.S.dtype != accumulator_dtype(query.dtype):
        raise ValueError(
            f"state.S is {state.S.dtype} of shape {tuple(state.S.shape)}, expected {accumulator_dtype(query.dtype)} of "
            f"shape {expected}; begin with State.empty(query, value)"
        )


def visible_tokens(key_mask: Tensor, key: Tensor) -> Tensor:
    """The key mask as (batch, heads, tokens).

    Raises:
        ValueError: unless it is boolean and (batch, tokens), or broadcasts to (batch, heads, tokens).
    """
    mask = key_mask.unsqueeze(1) if key_mask.dim() == 2 else key_mask
    fits = mask.dim() == 3 and all(m in (1, k) for m, k in zip(mask.shape, key.shape[:3], strict=True))
    if not fits or key_mask.dtype.is_floating_point or key_mask.dtype.itemsize != 1:
        raise ValueError(
            f"key_mask is {key_mask.dtype} of shape {tuple(key_mask.shape)}, expected bool of shape (batch, tokens) or "
            f"(batch, heads, tokens) for keys of shape {tuple(key.shape)}"
        )
    return mask.bool().expand(key.shape[:3])


def check_weighting(weighting: str | Tensor, causal: bool, query: Tensor, key: Tensor, masked: bool) -> None:
    """Raise ValueError for an unknown weighting or one without the form asked for."""
    if isinstance(weighting, Tensor):
        if weighting.dim() > 3 or any(
            w not in (1, k) for w, k in zip(reversed(weighting.shape), reversed(key.shape[:3]), strict=False)
        ):
            raise ValueError(
                f"weighting has shape {tuple(weighting.shape)}, expected weights that broadcast to "
                f"(batch, heads, tokens) = {tuple(key.shape[:3])}"
            )
        return
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting is {weighting!r}, expected a tensor or one of {', '.join(WEIGHTINGS)}")
    if causal and weighting == "query_mean":
        raise ValueError(
            "weighting='query_mean' has no causal form, because its weights need all the queries; "
            "use weighting='prefix_query_mean'"
        )
    if not causal and weighting == "prefix_query_mean":
        raise ValueError("weighting='prefix_query_mean' is causal; pass causal=True, or use weighting='query_mean'")
    if masked and weighting == "query_mean" and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"weighting='query_mean' with a key_mask got {query.shape[-2]} queries and {key.shape[-2]} keys, expected "
            "the same number, because a masked token's query must not enter the mean"
        )

"""The entry to the Triton kernels: `linvit.ops.linear_attention` without a fallback, and with packed sequences."""

import torch
from torch import Tensor

from linvit.arguments import broadcasts, check_device, check_floating, form, kind
from linvit.kernels.support import obstacle


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | tuple[str, str] = "elu1",
    weighting: str = "uniform",
    normalizer: str = "divide",
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`linvit.ops.linear_attention` on a GPU, with the same meaning except as stated here.

    Query, key and value get first derivatives; second ones, forward mode and vmap are not supported. Sums have a fixed
    order, so results are the same in every run.

    Args:
        query, key, value, feature_map, weighting, normalizer, rotary, key_mask, causal, eps: as there, within
            the limits that `obstacle` reports.
        cu_seqlens: packed sequences of different lengths (such as images of native resolution): the tensors are
            (1, heads, all tokens, width), sequence i has the tokens cu_seqlens[i] … cu_seqlens[i + 1] - 1, and attends
            only to itself. int32 or int64, (sequences + 1,), rising from 0 to the number of tokens, which is not
            checked because that would wait for the GPU. Rotary tables and key_mask are packed like the tensors.

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype and the values' order in memory.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: if the kernels cannot run, with the reason, or for shapes and dtypes that do not fit together.
    """
    _check_types(query, key, value, rotary, key_mask, cu_seqlens)
    axes = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
    reason = obstacle(query, key, value, rotary=rotary, causal=causal, **axes)
    if reason is not None:
        raise ValueError(f"the Triton kernels cannot run: {reason}; use linvit.ops.linear_attention")
    _check_shapes(query, key, value, rotary, causal or (key_mask is not None and weighting == "query_mean"))
    if cu_seqlens is not None:
        _check_packed(query, key, cu_seqlens)
    from linvit.kernels.operator import attend

    cos, sin = (None, None) if rotary is None else (table.float().contiguous() for table in rotary)
    visible = None
    if key_mask is not None:
        visible = (key_mask.unsqueeze(1) if key_mask.dim() == 2 else key_mask).bool().expand(key.shape[:3])
        if weighting == "query_mean":
            query = query.masked_fill(~visible.unsqueeze(-1), 0)
    maps = (feature_map, feature_map) if isinstance(feature_map, str) else feature_map
    options = *maps, weighting == "query_mean", causal, normalizer, eps
    out: Tensor = attend(query, key, value, cos, sin, visible, cu_seqlens, *options)[0]
    return out


def _check_types(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        shape, dtype, _ = form(name, x)
        check_floating(name, dtype)
        if len(shape) != 4:
            raise ValueError(f"`{name}` has shape {tuple(shape)}, expected (batch, heads, tokens, width)")
    if rotary is not None:
        if not isinstance(rotary, tuple) or len(rotary) != 2:
            raise TypeError(f"`rotary` is {kind(rotary)}, expected two tables: make them with rotary_1d or rotary_2d")
        for name, x in (("rotary[0]", rotary[0]), ("rotary[1]", rotary[1])):
            check_floating(name, form(name, x).dtype)
            check_device(name, form(name, x), form("query", query))
    if key_mask is not None:
        mask, sizes = form("key_mask", key_mask), (*key.shape[:3],)
        check_device("key_mask", mask, form("query", query))
        if len(mask.shape) not in (2, 3) or not broadcasts(mask.shape, sizes[::2] if len(mask.shape) == 2 else sizes):
            raise ValueError(
                f"`key_mask` has shape {tuple(mask.shape)}, expected (batch, tokens) or (batch, heads, tokens) for "
                f"keys of shape {tuple(key.shape)}"
            )
    if cu_seqlens is not None:
        form("cu_seqlens", cu_seqlens)


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor] | None, equally_many: bool
) -> None:
    """Raise ValueError for shapes that do not fit together: a kernel would read beyond its tensors."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    fits = (*shapes[0][:2], shapes[0][3]) == (*shapes[1][:2], shapes[1][3]) and shapes[2][:3] == shapes[1][:3]
    tokens = {shapes[0][2], shapes[1][2]}
    if equally_many or rotary is not None:
        fits = fits and len(tokens) == 1
    if rotary is not None:
        fits = fits and all(table.shape == (shapes[0][2], shapes[0][3] // 2) for table in rotary)
    if not fits or len({query.dtype, key.dtype, value.dtype}) > 1:
        tables = "none" if rotary is None else tuple(rotary[0].shape)
        raise ValueError(
            f"`query`, `key` and `value` have shapes {', '.join(map(str, shapes))}, dtypes {query.dtype}, {key.dtype}, "
            f"{value.dtype} and rotary tables {tables}, expected one dtype, (batch, heads, tokens, width) with equal "
            "batch, heads and width, as many values as keys, tables of (tokens, width / 2), and as many queries as "
            "keys with causal, rotary, or a key_mask and query_mean"
        )


def _check_packed(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"`cu_seqlens` is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, expected int32 or int64 of shape "
            "(sequences + 1,): the first token of each sequence, and the number of tokens"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"`cu_seqlens` is given with queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}, "
            "expected (1, heads, tokens, width) with equally many of both: put the sequences one after another"
        )
    if cu_seqlens.device != query.device:
        raise ValueError(f"`cu_seqlens` is on {cu_seqlens.device}, expected {query.device} like `query`: move it")

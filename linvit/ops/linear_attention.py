"""Linear attention for vision: one formula, five axes.

Per head, with κ the feature map, α the weighting (Σ_j α_j = 1), R the rotation and s = 1/√width,

    num_i = Rκ(q_i) · Σ_j α_j Rκ(k_j) ⊗ v_j        den_i = κ(q_i) · Σ_j α_j κ(k_j)        u = Σ_j α_j v_j

    divide      num / (den + ε)                              vanilla, RALA, CARE
    magnitude   s·num·(1 + 1/(s·den + ε)) - s·den·u          MALA
    subtract    s·num + (1 - s·den)·u                        InLine
    none        num                                          (sum: times the number of tokens) Efficient, Hydra
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from linvit.arguments import check_tensors
from linvit.formulas.feature_map import FeatureMap, query_and_key_map
from linvit.formulas.normalizer import Normalizer, resolve_normalizer
from linvit.ops.backend import kernel_for, plain_kernel_for
from linvit.ops.bidirectional import bidirectional, one_by_one, rule_of, tokens_of
from linvit.ops.causal import at_hand, causal_attention, chunks_of
from linvit.ops.checks import check_call, check_mixing, check_shard, check_state, weights_of
from linvit.ops.mixing import blocks_of, causal_mixed_attention, mixed_attention
from linvit.ops.position import Rotary
from linvit.ops.state import Shard, State, Weighting, visible_tokens


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Tensor | Weighting = "uniform",
    normalizer: str | Normalizer = "divide",
    rotary: Rotary | None = None,
    key_mask: Tensor | None = None,
    causal: bool | str = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    mixing: Tensor | None = None,
    blocks: tuple[int, int] | Tensor | None = None,
    grid: tuple[int, int] | None = None,
    shard: Shard | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Attention in time and memory linear in the number of tokens.

    Args:
        query: (batch, heads, queries, width), any strides; float16, bfloat16, float32 or float64.
        key: (batch, heads, tokens, width).
        value: (batch, heads, tokens, value width).
        feature_map: κ: a name in FEATURE_MAPS, such as "elu1", "relu", "exp" or "identity", or a function of a tensor
            (batch, heads, tokens, width) that keeps its shape; or a pair, one for queries and one for keys.
        weighting: α: "uniform"; "query_mean", softmax_j(s · mean_i κ(q_i) · κ(k_j)), RALA's; "prefix_query_mean", its
            causal form; nonnegative weights that broadcast to (batch, heads, tokens), normalized over the tokens that
            a query sees; or a function of κ(q), κ(k) and the mask (batch, heads, tokens) or None that returns such
            weights, for bidirectional attention.
        normalizer: a name in NORMALIZERS, such as "divide", "magnitude", "subtract", "none" or "sum", or a function of
            num, den, mass, scale and eps that returns gain and level, see `linvit.formulas.normalizer`.
        rotary: table from `rotary_1d`, `rotary_2d` or `rotary_3d`. Only the numerator is rotated, as in the released
            code, so rows of scores sum to one only without it.
        key_mask: True where a token counts, (batch, tokens) or (batch, heads, tokens). Masked keys and values may be
            anything, NaN included. With query_mean and prefix_query_mean so may the queries of these tokens: they do
            not enter the mean and read as zeros do, and there must be as many queries as keys. Otherwise all queries
            count, and a NaN in one reaches the gradients of keys and values.
        causal: True if each token sees itself and the tokens before it; "block" if it sees its block and the blocks
            before it. With prefix_query_mean a token's weight uses the mean over all that it sees.
        block_size: tokens in a block (such as those of an image in a video); the last block may be shorter. With
            causal=True for `mixing` only.
        cu_seqlens: packed sequences, as in FlashAttention: the tensors are (1, heads, all tokens, width), sequence i
            has the tokens cu_seqlens[i] … cu_seqlens[i + 1] - 1 and attends only to itself; its blocks begin with it.
            int32 or int64, (sequences + 1,), not decreasing from 0 to the number of tokens, which is checked on a CPU
            only, because it would wait for a GPU. A sequence may be empty. Rotary tables, masks and weights are packed
            like the tensors.
        mixing: a query of block i gives a token of block b its weight times mixing[i, b], which must not be negative,
            (blocks, blocks) or (heads, blocks, blocks) (MHLA, Eq. 3 and 4). If causal, with block_size, block i sees
            itself and the blocks before it, and what is above the diagonal is not used.
        blocks: of the tokens: (rows, columns) of blocks on the grid, whose sides differ by one token at most; tokens
            before the grid, such as a class token, are block 0 then. Or each token's block, int32 or int64 (tokens,),
            packed like the tensors. Cost stays linear in the tokens as long as their number is fixed.
        grid: (height, width) in tokens, which come row by row, and before them any number of others.
        shard: these tokens are only some of all; the others are reached through it, see `linvit.ops.state`. The output
            is that of these queries, as if one call had all tokens.
        eps: added to denominators.
        backend: "torch"; "triton", the kernels of `linvit.kernels`; "cpp", the kernel of `linvit.kernels.cpu`; or
            "auto", the C++ kernel if it came compiled or has been built, and can run, otherwise torch. Kernels support
            first derivatives in reverse mode only.

    Returns:
        (batch, heads, queries, value width) in the inputs' dtype. A query that sees no token reads zeros. Intermediate
        results are float32 (float64 for float64 inputs), under autocast too.

    Raises:
        TypeError: for an argument that should be a tensor or a Rotary and is not.
        ValueError: for anything but a known name where one is expected, shapes, dtypes, devices or masks that do not
            fit together, a combination without a causal (or bidirectional) form, or a kernel that cannot run; the
            message says what to use.

    Source: RALA (CVPR 2025), MALA (ICCV 2025) and CARE (CVPR 2025) in one formula; where papers and released code
    differ (scale, mean of κ(q), rotation), this follows the released code.
    """
    is_plain = causal is False and key_mask is None and block_size is None and cu_seqlens is None
    is_plain = is_plain and mixing is None and blocks is None and grid is None and shard is None
    if is_plain and (rotary is None or isinstance(rotary, Rotary)) and (plain := plain_kernel_for(backend, query)):
        out = plain(query, key, value, rotary, feature_map, weighting, normalizer, eps)
        if out is not None:
            return out
    form: dict[str, Any] = {"rotary": rotary, "causal": causal, "cu_seqlens": cu_seqlens}
    is_mixed = mixing is not None
    check_call(
        query,
        key,
        value,
        weighting=weighting,
        key_mask=key_mask,
        block_size=block_size,
        eps=eps,
        has_mixing=is_mixed,
        **form,
    )
    if is_mixed or blocks is not None or grid is not None:
        sequence: dict[str, Any] = {"causal": causal, "block_size": block_size, "cu_seqlens": cu_seqlens}
        check_mixing(mixing, blocks, grid, query, key, shard=shard, **sequence)
    check_shard(shard, weighting, cu_seqlens, block_size)
    if callable(weighting):
        weighting = weights_of(weighting, query, key, feature_map, key_mask)
    whole = not causal and cu_seqlens is None
    rule = rule_of(feature_map, weighting, normalizer, eps, query.dtype, shard, whole and key_mask is None)
    tokens = tokens_of(query, key, value, key_mask, rotary, rule)
    axes: dict[str, Any] = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
    kernel = kernel_for(backend, tokens.query, key, value, shard=shard, mixing=mixing, **form, **axes)
    if kernel is not None:
        form |= {"block_size": block_size, "key_mask": tokens.visible}
        if mixing is not None:
            cut = blocks_of(key, mixing, blocks, grid)
            form["blocks"] = cut.order, cut.cuts, mixing
        return kernel(tokens.query, key, value, eps=eps, weighting=weighting, **form)
    with without_autocast(query.device.type):
        if mixing is not None and causal:
            assert block_size is not None
            return causal_mixed_attention(tokens, rule, mixing, block_size, block_size if causal == "block" else 1)
        if mixing is not None:
            return mixed_attention(tokens, rule, mixing, blocks_of(key, mixing, blocks, grid, cu_seqlens))
        if whole:
            return bidirectional(tokens, rule)
        if cu_seqlens is not None and not causal and at_hand(cu_seqlens):
            return one_by_one(tokens, rule, cu_seqlens)
        block = block_size if causal == "block" else 1 if causal else None
        return causal_attention(tokens, rule, chunks_of(query.shape[2], block, cu_seqlens, query.device))[0]


def packed_linear_attention(
    projections: Tensor,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Tensor | Weighting = "uniform",
    normalizer: str | Normalizer = "divide",
    rotary: Rotary | None = None,
    key_mask: Tensor | None = None,
    causal: bool | str = False,
    block_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """`linear_attention` of queries, keys and values that lie in one tensor, as one linear layer makes them.

    They are read where they lie. On the Triton kernels so is the gradient written, as one tensor, which saves the
    copies that gradients of three views need.

    Args:
        projections: (batch, tokens, 3, heads, width): queries, keys and values.
        feature_map, weighting, normalizer, rotary, key_mask, causal, block_size, cu_seqlens, eps, backend: as there.

    Returns:
        (batch, tokens, heads, width) in the inputs' dtype.

    Raises:
        TypeError, ValueError: as there, and for projections of another shape.
    """
    check_tensors({"projections": projections})
    if projections.ndim != 5 or projections.shape[2] != 3:
        raise ValueError(
            f"`projections` has shape {tuple(projections.shape)}, expected (batch, tokens, 3, heads, width)"
        )
    query, key, value = projections.permute(2, 0, 3, 1, 4).unbind(0)
    form: dict[str, Any] = {"rotary": rotary, "causal": causal, "cu_seqlens": cu_seqlens}
    axes: dict[str, Any] = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
    hides = key_mask is not None and isinstance(weighting, str) and weighting == "query_mean"  # queries, by a copy
    if projections.is_cuda or backend == "triton":
        check_call(query, key, value, weighting=weighting, key_mask=key_mask, block_size=block_size, eps=eps, **form)
        query_and_key_map(feature_map, every_token_counts=True)
        resolve_normalizer(normalizer)
        kernel = kernel_for(backend, query, key, value, **form, **axes)
        axes_of_kernel = {} if kernel is None else kernel.keywords
        if axes_of_kernel and not hides and isinstance(weighting, str):
            from linvit.kernels import packed_linear_attention as kernel_of_packed

            visible = None if key_mask is None else visible_tokens(key_mask, key)
            form |= {"block_size": block_size, "key_mask": visible, "eps": eps}
            return kernel_of_packed(projections, weighting=weighting, **form, **axes_of_kernel).transpose(1, 2)
    options: dict[str, Any] = {"key_mask": key_mask, "block_size": block_size, "eps": eps, "backend": backend}
    return linear_attention(query, key, value, **form, **axes, **options).transpose(1, 2)


def linear_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: State | None = None,
    *,
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] = "elu1",
    weighting: str | Tensor = "uniform",
    normalizer: str | Normalizer = "divide",
    rotary: Rotary | None = None,
    key_mask: Tensor | None = None,
    block_size: int | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, State]:
    """Causal attention of the next tokens of sequences whose state is kept, in plain torch.

    Reading one token at a time needs constant time and memory for each.

    Args:
        query, key, value, feature_map, weighting, normalizer, key_mask, eps: as in `linear_attention`.
        state: of the tokens already read; None at the beginning.
        rotary: table that starts at these tokens.
        block_size: tokens in a block, as with causal="block"; None if each token sees itself and those before it. A
            block starts at these tokens too: read whole blocks, and the unfinished one again from the state before it.

    Returns:
        The output, (batch, heads, tokens, value width) in the inputs' dtype, and the state after these tokens.

    Raises:
        TypeError, ValueError: as `linear_attention`, and for a state of other heads, widths, dtype or device.
    """
    causal = True if block_size is None else "block"
    form: dict[str, Any] = {"rotary": rotary, "causal": causal, "block_size": block_size}
    check_call(query, key, value, weighting=weighting, key_mask=key_mask, eps=eps, **form)
    check_state(state, query, value)
    rule = rule_of(feature_map, weighting, normalizer, eps, query.dtype)
    tokens = tokens_of(query, key, value, key_mask, rotary, rule)
    with without_autocast(query.device.type):
        before = State.empty(query, value) if state is None else state
        return causal_attention(tokens, rule, chunks_of(query.shape[2], block_size or 1, None, query.device), before)


def rala(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Rank-augmented linear attention: elu1, query-mean weights, divide. Shapes and options as in `linear_attention`.

    Source: RALA (CVPR 2025), Eq. 4 to 6, as released; the modulation φ(x) belongs to the layer.
    """
    return linear_attention(query, key, value, weighting="query_mean", **options)


def mala(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Magnitude-aware linear attention: elu1, uniform weights, magnitude. Shapes and options as in `linear_attention`.

    Source: MALA (ICCV 2025), as released (similarity scaled by 1/(N·√width)).
    """
    return linear_attention(query, key, value, normalizer="magnitude", **options)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context without autocast, which would compute the sums in half precision."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # meta has none
        return torch.autocast(device_type, enabled=False)
    return nullcontext()

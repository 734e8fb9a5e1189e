"""A kernel is judged by its torch twin: its error against float64 may be twice the twin's own in the same dtype.

How far a float32 result is off depends on the order of its sums, by a factor of three from draw to draw, so the twin's
own error is the root mean square over several orders of the channels and, where not causal, of the tokens.
"""

import torch

from linvit.ops import Rotary, linear_attention

ORDERS = 8


def relative_error(actual, truth):
    return ((actual.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def output_and_gradients(function, tensors, grad, dtype, **options):
    tensors = [x.detach().to(dtype).requires_grad_() for x in tensors]
    if options.get("rotary") is not None:
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        options["rotary"] = Rotary(*(table.to(table_dtype) for table in options["rotary"]))
    out = function(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(dtype))]


def in_another_order(twin, tensors, grad, dtype, **options):
    """What the twin gives for the same tokens and channels, summed in another order."""
    query, key, value = tensors
    device = query.device
    pairs = torch.randperm(query.shape[-1] // 2, device=device)
    channels = (2 * pairs[:, None] + torch.arange(2, device=device)).flatten()
    channels = torch.cat((channels, torch.arange(len(channels), query.shape[-1], device=device)))
    values = torch.randperm(value.shape[-1], device=device)
    tokens = torch.arange(query.shape[2], device=device)
    if query.shape[2] == key.shape[2] and not options.get("causal") and "cu_seqlens" not in options:
        tokens = torch.randperm(query.shape[2], device=device)
        if options.get("key_mask") is not None:
            options["key_mask"] = options["key_mask"][..., tokens]
    if options.get("rotary") is not None:
        options["rotary"] = Rotary(*(table[tokens][:, pairs] for table in options["rotary"]))
    keys = tokens if query.shape[2] == key.shape[2] else torch.arange(key.shape[2], device=device)
    moved = [query[:, :, tokens][..., channels], key[:, :, keys][..., channels], value[:, :, keys][..., values]]
    out, dq, dk, dv = output_and_gradients(twin, moved, grad[:, :, tokens][..., values], dtype, **options)
    back = [tokens.argsort(), keys.argsort(), channels.argsort(), values.argsort()]
    return [
        out[:, :, back[0]][..., back[3]],
        dq[:, :, back[0]][..., back[2]],
        dk[:, :, back[1]][..., back[2]],
        dv[:, :, back[1]][..., back[3]],
    ]


def judge(tensors, dtype=torch.float32, kernel=None, twin=None, gradients=True, **options):
    """Assert that output and gradients of the kernel are as good as the twin's; the ratios of their errors."""
    kernel = kernel or (lambda *x, **o: linear_attention(*x, backend="triton", **o))
    twin = twin or (lambda *x, **o: linear_attention(*x, backend="torch", **o))
    tensors = [x.to(dtype) for x in tensors]
    query, _, value = tensors
    grad = torch.randn(*query.shape[:3], value.shape[-1], device=query.device).to(dtype)
    truth = output_and_gradients(twin, tensors, grad, torch.float64, **options)
    others = [in_another_order(twin, tensors, grad, dtype, **options) for _ in range(ORDERS)]
    actual = output_and_gradients(kernel, tensors, grad, dtype, **options)
    unit = torch.finfo(dtype).eps / 2  # no twin is better than one rounding of its result
    ratios = []
    for i, name in enumerate(("output", "query", "key", "value") if gradients else ("output",)):
        result, expected = actual[i], truth[i]
        assert result.dtype == dtype
        assert result.shape == expected.shape
        if expected.norm() == 0:
            assert result.abs().max() == 0, f"{name}: expected zeros"
            continue
        error = relative_error(result, expected)
        own = sum(relative_error(other[i], expected) ** 2 for other in others) / ORDERS
        own = max(own**0.5, unit)
        assert error <= 2 * own, f"{name}: error {error:.1e}, the twin's own is {own:.1e}"
        ratios.append(error / own)
    return ratios

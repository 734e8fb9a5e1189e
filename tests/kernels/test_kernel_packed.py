import itertools
from functools import partial

import pytest
import torch
from kernel_judge import judge
from tiers import slow

from linvit.ops import Rotary, rotary_2d
from linvit.ops import linear_attention as twin

KERNEL = partial(twin, backend="triton")
RALA = {"weighting": "query_mean"}
MALA = {"normalizer": "magnitude"}
BOTH = {**RALA, **MALA, "feature_map": "relu"}


def one_after_another(*tensors, cu_seqlens, rotary=None, key_mask=None, **options):
    """The twin on each sequence alone."""
    outs = []
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        if begin == end:
            continue
        table = None if rotary is None else Rotary(*(x[begin:end] for x in rotary))
        mask = None if key_mask is None else key_mask[..., begin:end]
        now = [x[:, :, begin:end] for x in tensors]
        outs.append(twin(*now, rotary=table, key_mask=mask, backend="torch", **options))
    return torch.cat(outs, dim=2)


def pack(device, sizes, heads=2, width=16, value_width=16):
    """Images of these grids, their rotary tables and where each begins."""
    lengths = [height * width for height, width in sizes]
    tables = [rotary_2d(size, width, device=device) for size in sizes if 0 not in size]
    rotary = Rotary(*(torch.cat(part) for part in zip(*tables, strict=True)))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    tensors = [torch.randn(1, heads, sum(lengths), w, device=device) for w in (width, width, value_width)]
    return tensors, rotary, cu_seqlens


@pytest.mark.parametrize(
    ("options", "processors"),
    [(BOTH, 10), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((RALA, 10), (MALA, 10), (BOTH, 1)))],
    ids=["both", "rala", "mala", "both unsplit"],
)
def test_images_of_native_resolution(device, tiled, options, processors):
    tiled(rows=16, processors=processors)
    tensors, rotary, cu_seqlens = pack(device, [(7, 5), (1, 1), (0, 4), (3, 6)], heads=1, value_width=24)
    judge(tensors, kernel=KERNEL, twin=one_after_another, cu_seqlens=cu_seqlens, rotary=rotary, **options)


@pytest.mark.parametrize("options", [RALA, *slow(MALA)], ids=["rala", "mala"])
def test_with_a_mask(device, tiled, options):
    tiled(rows=16, processors=4)
    tensors, rotary, cu_seqlens = pack(device, [(5, 4), (2, 2)])
    mask = torch.rand(1, 2, 24, device=device) > 0.4
    options = {**options, "cu_seqlens": cu_seqlens.long(), "rotary": rotary, "key_mask": mask}
    judge(tensors, kernel=KERNEL, twin=one_after_another, **options)


def test_one_sequence_is_a_batch_of_one(device):
    tensors, rotary, cu_seqlens = pack(device, [(4, 4)])
    alone = KERNEL(*tensors, rotary=rotary, **RALA)
    assert torch.equal(KERNEL(*tensors, rotary=rotary, cu_seqlens=cu_seqlens, **RALA), alone)


def test_the_operator_packs_with_either_backend(device):
    tensors, rotary, cu_seqlens = pack(device, [(4, 4), (3, 6)])
    options = {"rotary": rotary, "cu_seqlens": cu_seqlens, **RALA}
    packed = twin(*tensors, backend="triton", **options)
    torch.testing.assert_close(packed, twin(*tensors, backend="torch", **options), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"cannot run: causal='block' has no kernel for packed sequences; use 'auto' or 'torch'"
    ):
        twin(*tensors, backend="triton", causal="block", block_size=4, rotary=rotary, cu_seqlens=cu_seqlens)

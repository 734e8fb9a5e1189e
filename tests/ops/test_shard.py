from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from threading import Barrier

import pytest
import torch
from torch.testing import assert_close

from linvit.layers.operator import Operator
from linvit.ops import Rotary, State, linear_attention, rotary_1d
from linvit.ops.state import joined, joined_means

float64 = torch.float64
CUTS = (0, 5, 6, 30)
AXES = [
    {},
    {"normalizer": "magnitude"},
    {"weighting": "query_mean"},
    {"weighting": "query_mean", "normalizer": "subtract", "feature_map": "relu"},
    {"normalizer": "sum"},
    {"causal": True, "normalizer": "magnitude"},
    {"causal": True, "weighting": "prefix_query_mean"},
]


class Meeting:
    """Lets the shards of threads exchange what they have."""

    def __init__(self, number):
        self.barrier, self.held = Barrier(number, timeout=60), [None] * number

    def exchange(self, place, what):
        self.held[place] = what
        self.barrier.wait()
        every = list(self.held)
        self.barrier.wait()
        return every


class Met:
    """A shard of a thread; `hidden` of its first tokens count in another one."""

    def __init__(self, meeting, place, hidden=0):
        self.meeting, self.place, self.hidden = meeting, place, hidden

    def visible(self, tokens):
        return torch.arange(tokens) >= self.hidden if self.hidden else None

    def mean(self, mean, count, *, before):
        every = self.meeting.exchange(self.place, (mean, count))[: self.place if before else None]
        if not every:
            return torch.zeros_like(mean), torch.zeros_like(count)
        means, counts = (torch.stack(x) for x in zip(*every, strict=True))
        return joined_means(means, counts), counts.sum(0)

    def state(self, state, *, before):
        every = self.meeting.exchange(self.place, state)[: self.place if before else None]
        nothing = State(*(torch.zeros_like(x) for x in state))
        nothing = nothing._replace(shift=nothing.shift + torch.finfo(state.S.dtype).min)
        return reduce(joined, every, nothing)


def draw(tokens=CUTS[-1], **options):
    torch.manual_seed(0)
    return [torch.randn(2, 3, tokens, width, dtype=float64, **options) for width in (8, 8, 5)]


def in_shards(inputs, cuts, rotary=None, mask=None, overlap=0, **axes):
    """The output, each thread with the tokens between two cuts and `overlap` tokens before them that do not count."""
    meeting = Meeting(len(cuts) - 1)

    def of(place):
        start = max(cuts[place] - overlap, 0)
        some, hidden = slice(start, cuts[place + 1]), cuts[place] - start
        options = dict(axes, shard=Met(meeting, place, hidden))
        if rotary is not None:
            options["rotary"] = Rotary(*(table[some] for table in rotary))
        if mask is not None:
            options["key_mask"] = mask[:, some]
        return linear_attention(*(x[:, :, some] for x in inputs), **options)[:, :, hidden:]

    with ThreadPoolExecutor(len(cuts) - 1) as threads:
        return torch.cat(list(threads.map(of, range(len(cuts) - 1))), 2)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_shards_give_the_whole_and_its_gradients(axes, rotated, masked):
    rotary = rotary_1d(CUTS[-1], 8, dtype=float64) if rotated else None
    mask = torch.rand(2, CUTS[-1]) > 0.3 if masked else None
    results = []
    for forward in (linear_attention, lambda *inputs, **others: in_shards(inputs, CUTS, mask=mask, **others)):
        inputs = draw(requires_grad=True)
        options = {"key_mask": mask} if forward is linear_attention and masked else {}
        out = forward(*inputs, rotary=rotary, **axes, **options)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for whole, shards in zip(*results, strict=True):
        assert_close(shards, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "query_mean"])
def test_tokens_that_count_elsewhere_are_read_from(weighting):
    inputs = draw()
    whole = linear_attention(*inputs, weighting=weighting)
    assert_close(in_shards(inputs, CUTS, overlap=4, weighting=weighting), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "query_mean"])
def test_blocks_of_large_shards(weighting):
    inputs = draw(40_000)
    whole = linear_attention(*inputs, weighting=weighting, normalizer="magnitude")
    shards = in_shards(inputs, (0, 17_001, 40_000), weighting=weighting, normalizer="magnitude")
    assert_close(shards, whole, rtol=1e-12, atol=1e-12)


def test_what_a_shard_excludes():
    query, key, value = draw()
    shard = Met(Meeting(1), 0)
    with pytest.raises(ValueError, match="`feature_map` is 'softmax_tokens', which combines all tokens"):
        linear_attention(query, key, value, feature_map=("softmax", "softmax_tokens"), shard=shard)
    with pytest.raises(ValueError, match="`weighting` is a Tensor, but there is a `shard`: leave one out"):
        linear_attention(query, key, value, weighting=torch.ones(30), shard=shard)
    with pytest.raises(ValueError, match="`cu_seqlens` is a Tensor, but there is a `shard`"):
        linear_attention(query[:1], key[:1], value[:1], cu_seqlens=torch.tensor([0, query.shape[2]]), shard=shard)
    with pytest.raises(ValueError, match="`block_size` is a int, but there is a `shard`"):
        linear_attention(query, key, value, causal="block", block_size=4, shard=shard)
    with pytest.raises(ValueError, match="the kernels support no shard"):
        linear_attention(query.float(), key.float(), value.float(), shard=shard, backend="triton")


def test_softmax_needs_every_token():
    import timm

    network = timm.create_model("mavit_nano", pattern="LLSS").eval()
    for module in network.modules():
        if isinstance(module, Operator):
            module.shard = Met(Meeting(1), 0)
    with pytest.raises(ValueError, match="softmax attention, which needs all tokens at once"):
        network(torch.randn(1, 3, 64, 64))

import itertools
import math

import pytest
import torch
from torch.nn.functional import pad

from linvit.layers.conformer import ConformerBlock, by_distance, relative_positions
from linvit.layers.mechanisms import at
from linvit.models.by_name import create
from linvit.models.conformer import Conformer, StreamCache

MECHANISMS = tuple(at("sequences"))
SMALL = {"mels": 10, "width": 16, "depth": 2, "heads": 2, "kernel": 6}


def conformer(mechanism, **options):
    torch.manual_seed(0)
    network = Conformer(7, **{**SMALL, "mechanism": mechanism, "dropout": 0.0, **options}).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)
    return network.eval()


def features(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("causal", "norm"), [(False, "batch"), (True, "layer")])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_padding_never_leaks(mechanism, causal, norm):
    lengths = (53, 40, 39, 38, 37, 5, 1)
    network = conformer(mechanism, causal=causal, conv_norm=norm, rope=True)
    x = features(len(lengths), max(lengths) + 3, 10)  # what is beyond the end is not even zero
    logits, counts = network(x, torch.tensor(lengths))
    for row, (length, count) in enumerate(zip(lengths, counts.tolist(), strict=True)):
        alone, one = network(x[row : row + 1, :length], torch.tensor([length]))
        assert one.item() == count == alone.shape[1] == -(-length // 4)
        assert (logits[row, :count] - alone[0]).abs().max() < 1e-11


@pytest.mark.parametrize("mechanism", ["softmax", "mala"])
def test_float32_padding_stays_within_1e_5(mechanism):
    network = conformer(mechanism).float()
    x = features(3, 80, 10).float()
    lengths = torch.tensor([80, 61, 33])
    logits, counts = network(x, lengths)
    for row, count in enumerate(counts.tolist()):
        alone, _ = network(x[row : row + 1, : lengths[row]], lengths[row : row + 1])
        assert (logits[row, :count] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("mechanism", ["softmax", "mala"])
def test_padding_leaves_loss_gradients_and_batch_statistics_alone(mechanism):
    lengths = torch.tensor([40, 23])
    found = []
    for extra in (0, 17):
        network = conformer(mechanism).train()
        x = pad(features(2, 40, 10), (0, 0, 0, extra), value=3.0)
        logits, counts = network(x, lengths)
        sum(logits[row, :count].square().sum() for row, count in enumerate(counts.tolist())).backward()
        found.append(
            [parameter.grad for parameter in network.parameters()]
            + [module.running_var for module in network.modules() if isinstance(module, torch.nn.BatchNorm1d)]
        )
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("rope", "norm"), [(False, "batch"), (True, "layer")])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_stream_in_pieces_is_the_whole_at_once(mechanism, rope, norm):
    network = conformer(mechanism, causal=True, rope=rope, conv_norm=norm)
    x = features(2, 91, 10)
    whole, _ = network(x, torch.tensor([91, 91]))
    for sizes in ((4,) * 22 + (3,), (40, 8, 43), (91,)):
        cache = StreamCache()
        logits = [network.read(piece, cache) for piece in x.split(sizes, 1)]
        assert (torch.cat(logits, 1) - whole).abs().max() < 1e-11
        assert cache.features == 91


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_causal_network_sees_nothing_later(mechanism):
    network = conformer(mechanism, causal=True)
    x, lengths = features(1, 60, 10), torch.tensor([60])
    before, _ = network(x, lengths)
    changed = x.clone()
    changed[:, 33:] += 1
    after, _ = network(changed, lengths)
    assert torch.equal(before[:, :9], after[:, :9])  # frame 8 hears features up to 32
    assert (before[:, 9:] - after[:, 9:]).abs().max() > 1e-3


def test_linear_memory_stays_while_that_of_softmax_grows():
    sizes = {}
    for mechanism in ("softmax", "mala"):
        network, cache = conformer(mechanism, causal=True), StreamCache()
        for piece in features(1, 80, 10).split(40, 1):
            network.read(piece, cache)
            sizes.setdefault(mechanism, []).append(cache.num_bytes())
    assert sizes["mala"][0] == sizes["mala"][1]
    assert sizes["softmax"][0] < sizes["softmax"][1]


def test_softmax_attention_is_that_of_transformer_xl():
    attention = conformer("softmax").blocks[0].attn
    x = features(2, 5, 16)
    query, key, value = (t.unflatten(-1, (2, 8)) for t in attention.qkv(x).chunk(3, -1))
    scores = torch.empty(2, 2, 5, 5, dtype=torch.float64)
    for i, j in itertools.product(range(5), range(5)):
        place = attention.position(relative_positions(i - j, i - j, 16, x))[0].unflatten(-1, (2, 8))
        content = ((query[:, i] + attention.content_bias) * key[:, j]).sum(-1)
        scores[:, :, i, j] = (content + ((query[:, i] + attention.position_bias) * place).sum(-1)) * 8**-0.5
    mixed = torch.einsum("bhij,bjhw->bihw", scores.softmax(-1), value).flatten(-2)
    out = attention(x, relative_positions(4, -4, 16, x))
    assert (out - attention.proj(mixed)).abs().max() < 1e-12


def test_positions_are_sines_and_scores_fall_on_their_keys():
    table = relative_positions(2, -1, 4, torch.zeros((), dtype=torch.float64))
    assert table.shape == (4, 4)
    assert table[0, 0].item() == pytest.approx(math.sin(2))
    assert table[3, 2].item() == pytest.approx(math.sin(-0.01))
    assert table[3, 3].item() == pytest.approx(math.cos(-0.01))
    distances = torch.tensor([4, 3, 2, 1, 0, -1])  # five keys, two queries: at places 3 and 4
    placed = by_distance(distances.expand(2, 6), 5)
    assert placed.tolist() == [[3, 2, 1, 0, -1], [4, 3, 2, 1, 0]]


@pytest.mark.parametrize(
    ("mechanism", "count"), [("softmax", 10_340_416), ("linear", 10_338_112), ("mala", 10_338_112)]
)
def test_conformer_small_has_the_published_10_3_million_parameters(mechanism, count):
    with torch.device("meta"):
        network = create("conformer_small", 1024, mechanism=mechanism, head="transducer")
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    parts = {"blocks": 8_110_080, "subsampling": 603_072, "predictor": 1_149_440, "joint": 477_824}
    if mechanism == "softmax":
        assert {n: sum(p.numel() for p in getattr(network, n).parameters()) for n in parts} == parts


def test_a_transducer_gives_logits_of_every_frame_and_place():
    network = conformer("mala", head="transducer", predictor_width=12)
    text = torch.tensor([[1, 2, 3], [4, 5, 0]])
    logits, counts = network(features(2, 21, 10), torch.tensor([21, 9]), text)
    assert logits.shape == (2, 6, 4, 7)
    assert counts.tolist() == [6, 3]
    changed, _ = network(features(2, 21, 10), torch.tensor([21, 9]), torch.tensor([[1, 2, 6], [4, 5, 0]]))
    assert torch.equal(logits[:, :, :3], changed[:, :, :3])
    assert not torch.equal(logits[0, :, 3], changed[0, :, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "lm"}, "`head` is 'lm', expected one of ctc, transducer"),
        ({"heads": 5}, "`width` is 64 and `heads` 5"),
        ({"width": 33, "heads": 3}, "`width` is 33, but relative positions need an even number"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        create("conformer_nano", 11, **arguments)


def test_what_cannot_be_streamed_says_so():
    with pytest.raises(ValueError, match="causal Conformer"):
        conformer("mala").read(features(1, 8, 10), StreamCache())
    network, cache = conformer("mala", causal=True), StreamCache()
    network.read(features(1, 7, 10), cache)
    with pytest.raises(ValueError, match="7 frames were read, which is not a multiple of 4"):
        network.read(features(1, 8, 10), cache)
    with pytest.raises(ValueError, match=r"expected \(batch, frames, 10\): compute features"):
        network.read(features(1, 8, 12), StreamCache())


@pytest.mark.parametrize("head", ["ctc", "transducer"])
@pytest.mark.parametrize("mechanism", ["softmax", "mala"])
def test_it_trains_under_autocast(mechanism, head):
    network = conformer(mechanism, head=head, predictor_width=12).float().train()
    x, lengths, text = features(2, 40, 10).float(), torch.tensor([40, 23]), torch.tensor([[1, 2], [3, 4]])
    with torch.autocast("cpu", torch.bfloat16):
        logits, counts = network(x, lengths, text)
    whole, _ = network(x, lengths, text)
    for row, count in enumerate(counts.tolist()):
        difference = (logits[row, :count].float() - whole[row, :count]).abs().max()
        assert difference < 0.1 * whole[row, :count].abs().max()
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_each_feed_forward_of_a_block_counts_half():
    block, x = ConformerBlock(8, 2, "linear", 3).eval(), torch.randn(1, 5, 8)
    for layer in (block.attn.proj, block.conv.proj):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    y = x + block.ffn1(block.norm1(x)) / 2
    torch.testing.assert_close(block(x), block.norm4(y + block.ffn2(block.norm3(y)) / 2))

import pytest
import torch
from tiers import quick

from linvit.layers.mechanisms import at
from linvit.models.by_name import create
from linvit.models.sequence import DecoderCache, _sampled, generate

MECHANISMS = list(at("sequences"))
EVERYTHING = {"lepe": 5, "modulation": "silu", "rope": True}
# among the quick tests every mechanism in one of the surroundings, and RALA in both
CASES = [(name, around) for name in MECHANISMS for around in ({}, EVERYTHING)]
QUICK = [case for index, case in enumerate(CASES) if case[0] == "rala" or index % 4 in (0, 3)]
every_mechanism_and_surrounding = pytest.mark.parametrize(
    ("mechanism", "around"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)


def small(mechanism, dtype=torch.float64, **options):
    sizes = {"width": 16, "depth": 2, "heads": 2, "hidden": 24}
    network = create("sequence_nano", 29, mechanism=mechanism, **sizes | options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network.to(dtype).eval()


def tokens(batch=2, length=77):
    return torch.randint(29, (batch, length))


def recurrent(network, row, pieces):
    memory = DecoderCache()
    return torch.cat([network.read(piece, memory) for piece in row.split(pieces, 1)], 1)


@every_mechanism_and_surrounding
@torch.no_grad()
def test_matrix_chunked_recurrent_and_piecewise_reading_agree(mechanism, around):
    network, row = small(mechanism, **around), tokens(length=70)
    chunked = network(row)
    assert chunked.std() > 0.1
    for other in (network(row, form="matrix"), recurrent(network, row, 1), recurrent(network, row, [50, 1, 19])):
        assert (other - chunked).abs().max() < 1e-11


@pytest.mark.parametrize("mechanism", MECHANISMS)
@torch.no_grad()
def test_float32_decodes_as_it_reads_up_to_rounding(mechanism):
    exact, row = small(mechanism), tokens()
    network = small(mechanism, torch.float32)
    network.load_state_dict(exact.state_dict())
    truth = exact(row)
    # a running mean over n tokens is rounded n times at most in each layer
    roundings = row.shape[1] * len(network.blocks) * torch.finfo(torch.float32).eps
    for form in (network(row), network(row, form="matrix"), recurrent(network, row, 1)):
        assert (form - truth).abs().max() < roundings * truth.abs().max()


@every_mechanism_and_surrounding
@torch.no_grad()
def test_a_changed_token_changes_nothing_before_it(mechanism, around):
    network, row = small(mechanism, **around), tokens(1, 70)
    before = network(row)
    for place in (3, 40, 66):
        other = row.clone()
        other[0, place] = (other[0, place] + 1) % 29
        after = network(other)
        assert (after[:, :place] - before[:, :place]).abs().max() < 1e-12
        assert (after[:, place:] - before[:, place:]).abs().amax(-1).min() > 1e-9


@every_mechanism_and_surrounding
@torch.no_grad()
def test_documents_in_a_row_read_as_if_alone_and_padding_is_one_of_them(mechanism, around):
    network, row = small(mechanism, **around), tokens(2, 40)
    documents = torch.tensor([[0] * 11 + [1] * 29, [4] * 3 + [5] * 30 + [9] * 7])
    packed = network(row, documents)
    for index, start, end in ((0, 0, 11), (0, 11, 40), (1, 0, 3), (1, 3, 33), (1, 33, 40)):
        alone = network(row[index : index + 1, start:end])
        assert (packed[index, start:end] - alone[0]).abs().max() < 1e-12


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_greedy_writing_equals_the_most_probable_token_of_the_parallel_form(mechanism):
    network, prompt = small(mechanism), tokens(1, 5)[0]
    written = list(generate(network, prompt, 62, temperature=0))
    with torch.no_grad():
        row = torch.cat((prompt, torch.tensor(written)))[None]
        assert network(row)[0, 4:-1].argmax(-1).tolist() == written


def test_gradients_of_chunks_equal_those_of_the_matrix():
    for mechanism in MECHANISMS:
        network, row = small(mechanism), tokens(1, 70)
        found = []
        for form in ("chunked", "matrix"):
            network.zero_grad()
            network(row, form=form).square().mean().backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in network.parameters()]))
        assert (found[0] - found[1]).abs().max() < 1e-10 * found[1].abs().max()


def test_the_published_size_has_the_same_parameters_with_every_mechanism():
    with torch.device("meta"):
        counts = {
            mechanism: sum(p.numel() for p in create("sequence_340m", 32_000, mechanism=mechanism).parameters())
            for mechanism in MECHANISMS
        }
        gated = create("sequence_340m", 32_000, modulation="linear")
    layer = 4 * 1024**2 + 3 * 1024 * 2816 + 3 * 1024 * 4 + 2 * 1024
    assert set(counts.values()) == {32_000 * 1024 + 24 * layer + 1024} == {341_394_432}
    assert sum(p.numel() for p in gated.parameters()) == 341_394_432 + 24 * 1024**2


def test_a_seed_writes_the_same_again_and_little_of_top_p_is_greedy():
    network, prompt = small("mala"), tokens(1, 3)[0]

    def write(seed, **options):
        return list(generate(network, prompt, 20, generator=torch.Generator().manual_seed(seed), **options))

    assert write(1) == write(1)
    assert write(1) != write(2)
    assert write(1, top_p=1e-9) == write(1, temperature=1e-42) == write(0, temperature=0)


@pytest.mark.parametrize("mechanism", quick(MECHANISMS, ["rala", "softmax"]))
def test_sampled_tokens_are_those_of_the_parallel_form(mechanism):
    network, prompt = small(mechanism), tokens(1, 5)[0]
    written = list(generate(network, prompt, 70, 0.8, 0.9, torch.Generator().manual_seed(3)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        logits = network(torch.cat((prompt, torch.tensor(written)))[None])[0, 4:-1]
    assert [_sampled(row.float(), 0.8, 0.9, generator) for row in logits] == written
    assert len(set(written)) > 3


def test_top_p_draws_from_the_most_probable_alone():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    sampled = [_sampled(logits, 1.0, 0.6, generator) for _ in range(400)]
    assert set(sampled) == {0, 1}
    assert sampled.count(0) / 400 == pytest.approx(0.5 / 0.8, abs=4 * (0.25 / 400) ** 0.5)


def test_writing_ends_at_the_stop_token():
    network, prompt = small("mala"), tokens(1, 3)[0]
    written = list(generate(network, prompt, 20, temperature=0))
    assert list(generate(network, prompt, 20, temperature=0, stop=written[4])) == written[: written.index(written[4])]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create("sequence_nono", 9), r"Unknown model 'sequence_nono': did you mean 'sequence_nano'"),
        (lambda: create("sequence_nano", 9, withd=3), r"no argument 'withd': did you mean `width`"),
        (lambda: small("mala")(tokens(), form="parallel"), r"`form` is 'parallel', expected one of chunked, matrix"),
        (lambda: create("sequence_nano", 9, vocabulary=3), r"no argument 'vocabulary'"),
        (lambda: generate(small("mala"), torch.tensor([]), 3), "`prompt` is empty, expected"),
        (lambda: generate(small("mala"), tokens()[0], 3, float("nan")), r"`temperature` is nan"),
        (lambda: generate(small("mala"), tokens()[0], 3, 1.0, 0.0), r"`top_p` is 0\.0"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

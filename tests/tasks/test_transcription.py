import itertools
import math

import pytest
import torch

from linvit.tasks.speech import loss_per_token, transducer_loss
from linvit.tasks.transcription import greedy, prefix_beam, spelled, word_edits

NAMES = ["<blank>", "▁A", "▁B"]


def joined(path):
    return tuple(piece for piece, _ in itertools.groupby(path) if piece)


def by_every_path(logits):
    """The probability of every text, summed over all its paths."""
    scores = logits.double().log_softmax(-1).exp()
    found = {}
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        probability = math.prod(float(scores[frame, piece]) for frame, piece in enumerate(path))
        found[joined(path)] = found.get(joined(path), 0) + probability
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_wide_beam_finds_the_most_probable_text(seed):
    logits = 2 * torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    every = by_every_path(logits)
    assert tuple(prefix_beam(logits, 100)) == max(every, key=every.get)


def test_a_beam_finds_what_greedy_search_misses():
    logits = torch.tensor([[0.4, 0.35, 0.25]] * 2).log()  # blank leads each frame, yet A is the most probable text
    assert greedy(logits[None], torch.tensor([2])) == [[]]
    assert prefix_beam(logits, 4) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_a_language_model_is_weighed_as_said(seed):
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

    def language_model(before, word):
        return -3.0 if before and before[-1] == word else -0.2

    def total(text):
        words = [NAMES[piece][1:] for piece in text]
        said = sum(language_model(tuple(words[:place]), word) for place, word in enumerate(words))
        return math.log(every[text]) + 0.7 * said + 0.4 * len(words)

    every = by_every_path(logits)
    found = prefix_beam(logits, 200, NAMES, language_model, weight=0.7, bonus=0.4)
    assert tuple(found) == max(every, key=total)


def test_greedy_joins_repetitions_drops_blanks_and_stops_at_the_end():
    path = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 0], [2, 2, 0, 1, 1, 1, 1, 1]])
    logits = torch.nn.functional.one_hot(path, 3).float()
    assert greedy(logits, torch.tensor([8, 3])) == [[1, 1, 2], [2]]


def test_pieces_are_spelled():
    assert spelled([1, 2, 3, 1], ["", "▁TH", "E", "▁CAT"]) == "THE CAT TH"
    assert spelled([], ["", "▁A"]) == ""


@pytest.mark.parametrize(
    ("said", "written", "edits"),
    [
        ("A B C", "A B C", 0),
        ("A B C", "A X C", 1),
        ("A B C", "A C", 1),
        ("A B C", "A B B C", 1),
        ("A B C", "", 3),
        ("A B C D", "B C D E", 2),
    ],
)
def test_word_edits(said, written, edits):
    assert word_edits(said, written) == (edits, len(said.split()))
    assert word_edits("", written) == (len(written.split()), 0)


def test_the_loss_is_that_of_every_path():
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    targets = {"tokens": torch.tensor([[1, 2], [2, 0]]), "counts": torch.tensor([2, 1])}
    losses = loss_per_token(logits, torch.tensor([4, 3]), targets)
    first, second = by_every_path(logits[0]), by_every_path(logits[1, :3])
    expected = [-math.log(first[1, 2]) / 2, -math.log(second[(2,)])]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "frames", "aligned"),
    [
        ([1, 2, 1], 3, True),
        ([1, 2, 1], 2, False),
        ([1, 1], 2, False),
        ([1, 1], 3, True),
        ([], 1, True),
        ([0, 0], 2, True),
    ],
)
def test_an_utterance_without_an_alignment_is_left_out_of_the_loss(tokens, frames, aligned):
    count = len(tokens) if any(tokens) else 0  # zeros are padding
    logits = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    texts = torch.tensor([tokens + [0] * (4 - len(tokens)), [2, 0, 0, 0]])
    losses = loss_per_token(logits, torch.tensor([frames, 6]), {"tokens": texts, "counts": torch.tensor([count, 1])})
    assert len(losses) == 1 + aligned
    assert (losses > 0).all()
    empty = {"tokens": torch.zeros(2, 0, dtype=torch.long), "counts": torch.tensor([0, 0])}
    assert len(loss_per_token(logits, torch.tensor([frames, 6]), empty)) == 2


def by_every_way(scores, text):
    """The probability of a text, summed over every order of its pieces and one blank a frame, the last step a blank."""
    frames = len(scores)
    total = 0.0
    for blanks in itertools.combinations(range(frames - 1 + len(text)), frames - 1):
        frame = place = 0
        probability = 1.0
        for step in range(frames - 1 + len(text)):
            if step in blanks:
                probability *= float(scores[frame, place, 0])
                frame += 1
            else:
                probability *= float(scores[frame, place, text[place]])
                place += 1
        total += probability * float(scores[frame, place, 0])
    return total


def test_a_transducers_loss_is_that_of_every_way():
    logits = torch.randn(3, 4, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    texts, lengths = [[1, 3, 3], [4], []], torch.tensor([4, 3, 1])
    pieces = torch.tensor([text + [2] * (3 - len(text)) for text in texts])
    losses = transducer_loss(logits, lengths, pieces, torch.tensor([3, 1, 0]))
    for row, text in enumerate(texts):
        scores = logits[row, : lengths[row]].softmax(-1)
        assert losses[row].item() == pytest.approx(-math.log(by_every_way(scores, text)), rel=1e-5)


def test_padding_leaves_a_transducers_loss_and_gradients_alone():
    logits = torch.randn(1, 3, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, 2, 0, 5), value=7.0)
    lengths, counts = torch.tensor([3]), torch.tensor([2])
    alone = transducer_loss(logits, lengths, torch.tensor([[1, 2]]), counts)
    together = transducer_loss(padded, lengths, torch.tensor([[1, 2, 0, 3]]), counts)
    assert torch.allclose(alone, together)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (alone, together)]
    assert torch.allclose(*gradients, atol=1e-6)

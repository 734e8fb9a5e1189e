import torch

from linvit.data.text import Copy, Recall

IGNORED = -100


def test_every_pair_is_asked_for_once_and_answered_rightly():
    source = Recall(pairs=5, keys=9, values=4, length=6, val_length=6)
    for tokens, about in [source.train_set()[index] for index in range(6)]:
        pairs = dict(tokens[:10].view(5, 2).tolist())
        assert len(pairs) == 5
        assert max(pairs) < 9 <= min(pairs.values())
        assert (about["targets"][:10] == IGNORED).all()
        assert [pairs[key] for key in tokens[10:].tolist()] == about["targets"][10:].tolist()
        assert sorted(tokens[10:].tolist()) == sorted(pairs)


def test_symbols_are_repeated_after_the_mark():
    source = Copy(symbols=6, alphabet=5, length=4, val_length=4)
    tokens, about = source.val_set()[2]
    assert tokens[6] == 5
    assert tokens[7:].tolist() == tokens[:5].tolist()
    assert about["targets"].tolist() == [IGNORED] * 6 + tokens[:6].tolist()
    assert source.num_classes == 6


def test_sequences_are_drawn_from_seed_and_part():
    def first(seed, part):
        source = Recall(seed=seed)
        return (source.train_set() if part == "train" else source.val_set())[0][0]

    assert torch.equal(first(0, "train"), first(0, "train"))
    assert not torch.equal(first(0, "train"), first(1, "train"))
    assert not torch.equal(first(0, "train"), first(0, "val"))

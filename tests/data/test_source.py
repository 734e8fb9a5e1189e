import pytest

from linvit.data.dense.scenes import make_scenes
from linvit.data.images.digits import Digits
from linvit.data.speech.spoken_digits import make_speech
from linvit.data.text.files import Stdlib
from linvit.data.text.recall import Recall


@pytest.mark.parametrize(
    "make",
    [
        lambda seed, folder: Digits(seed=seed),
        lambda seed, folder: Digits(split=seed),
        lambda seed, folder: Recall(seed=seed),
        lambda seed, folder: Stdlib(seed=seed),
        lambda seed, folder: list(make_scenes(folder, 1, 1, 64, seed)),
        lambda seed, folder: list(make_speech(str(folder), 1, 1, seed)),
    ],
)
@pytest.mark.parametrize("seed", [-1, 0.5])
def test_a_seed_below_zero_is_one_sentence(make, seed, tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(
        ValueError, match=rf"^`(seed|split)` is {seed}, expected a whole number from 0 to 4,294,967,295: change it\.$"
    ):
        make(seed, folder)
    assert not folder.exists()


def test_fewer_validation_samples_than_processes_are_one_sentence(monkeypatch):
    source = Digits()
    monkeypatch.setattr("linvit.data.source.replica", lambda: (0, len(source.val_set()) + 1))
    with pytest.raises(ValueError, match=r"There are \d+ validation images, but \d+ processes: use fewer processes"):
        source.val_dataloader()

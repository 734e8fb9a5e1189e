import pytest

from linvit.data.dense.scenes import make_scenes
from linvit.data.images.small import Digits
from linvit.data.speech.spoken_digits import make_speech


@pytest.mark.parametrize("make", [make_scenes, make_speech])
def test_a_seed_below_zero_is_one_sentence(make, tmp_path):
    says = r"^`seed` is -1, expected a whole number from 0 to 4,294,967,295: change it\.$"
    with pytest.raises(ValueError, match=says):
        list(make(str(tmp_path / "new"), 1, 1, **{"size": 64} if make is make_scenes else {}, seed=-1))
    assert not (tmp_path / "new").exists()


def test_fewer_validation_samples_than_processes_are_one_sentence(monkeypatch):
    source = Digits()
    monkeypatch.setattr("linvit.data.source.replica", lambda: (0, len(source.val_set()) + 1))
    with pytest.raises(ValueError, match=r"There are \d+ validation images, but \d+ processes: use fewer processes"):
        source.val_dataloader()

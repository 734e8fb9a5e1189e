import pytest
import timm
import torch
from safetensors.torch import save_file

from linvit.models.by_name import create
from linvit.tasks.initialization import initialize, weights_file


def network(name="ravlt_nano", classes=10):
    return timm.create_model(name, num_classes=classes)


def same(one, two, but=""):
    pairs = zip(one.state_dict().items(), two.state_dict().values(), strict=True)
    return all(torch.equal(value, other) for (key, value), other in pairs if not but or not key.startswith(but))


@pytest.fixture
def trained():
    torch.manual_seed(7)
    return network()


@pytest.mark.parametrize("wrapper", ["model", "state_dict", None])
def test_a_file_of_weights(trained, tmp_path, wrapper):
    weights = trained.state_dict()
    torch.save({wrapper: weights} if wrapper else weights, tmp_path / "weights.pth")
    start = network()
    assert initialize(start, tmp_path / "weights.pth").endswith("weights.pth, classifier included.")
    assert same(start, trained)


def test_a_safetensors_file_and_a_model_of_timms(tmp_path):
    torch.manual_seed(7)
    trained, start = (timm.create_model("test_resnet", num_classes=classes) for classes in (5, 3))
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    said = initialize(start, tmp_path / "weights.safetensors")
    assert said.endswith("without its classifier, which has 5 classes instead of 3.")
    assert same(start, trained, but="fc.")
    assert not same(start, trained, but="conv1.")


@pytest.mark.parametrize("averaged", [True, False])
def test_a_run_gives_its_moving_average_where_it_has_one(trained, tmp_path, averaged):
    raw, start = network(), network()
    initialize(start, record(tmp_path / "run", raw, average=trained if averaged else None))
    assert same(start, trained if averaged else raw)


def test_both_classifiers_of_care_are_left_out(tmp_path):
    torch.manual_seed(7)
    trained, start = network("care_nano"), network("care_nano", 4)
    torch.save(trained.state_dict(), tmp_path / "care.pth")
    before = {key: value.clone() for key, value in start.state_dict().items()}
    assert "10 classes instead of 4" in initialize(start, tmp_path / "care.pth")
    changed = {key for key, value in start.state_dict().items() if not torch.equal(value, before[key])}
    assert not {key for key in changed if ".fc." in key}
    assert any(key.startswith("stages.3") for key in changed)


def test_another_model_is_refused_and_nothing_is_changed(tmp_path):
    torch.save(network("care_nano").state_dict(), tmp_path / "care.pth")
    start, before = network(), network()
    before.load_state_dict(start.state_dict())
    with pytest.raises(ValueError, match=r"care\.pth do not fit this RAVLT: only \d+ of its \d+ tensors .*: give"):
        initialize(start, tmp_path / "care.pth")
    assert same(start, before)


def test_other_classes_can_be_refused(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"head\.fc\.weight is not: give weights"):
        initialize(network(classes=3), tmp_path / "weights.pth", same_classes=True)


def record(folder, network, kind="best", average=None, **model):
    """A checkpoint of a run that records its model."""
    held = {f"network.{key}": value for key, value in network.state_dict().items()} | {"images.sum": torch.tensor(0)}
    if average is not None:
        held |= {f"ema.module.{key}": value for key, value in average.state_dict().items()}
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"linvit": {"recipe": {"model": model}}, "state_dict": held}, folder / "checkpoints" / f"{kind}.ckpt")
    return folder


def test_a_run_with_its_last_checkpoint_alone(trained, tmp_path):
    start = network()
    assert "last.ckpt" in initialize(start, record(tmp_path / "run", trained, "last", name="ravlt_nano"))
    assert same(start, trained)


def test_a_family_whose_weights_have_the_same_shapes_is_refused(tmp_path):
    run = record(tmp_path / "run", network("mavit_nano"), name="mavit_nano")
    with pytest.raises(ValueError, match="belong to mavit_nano, but this is a network of the family ravlt"):
        initialize(network(), run)
    initialize(network("mavit_nano"), run)


def test_another_mechanism_is_refused(tmp_path):
    rala, mala = (create("sequence_nano", 5, mechanism=name, width=16, depth=1, heads=2) for name in ("rala", "mala"))
    with pytest.raises(ValueError, match="sequence_nano with rala attention, but this is a network with mala"):
        initialize(mala, record(tmp_path / "run", rala, name="sequence_nano", mechanism="rala"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "contains no weights"),
        ({"linvit": {}}, "contains no weights"),
        ({"linvit": None, "state_dict": {}}, "contains no weights"),
        ({"linvit": {}, "state_dict": {"other.weight": torch.zeros(1)}}, "only 0 of its"),
        ({"a": 1}, "contains 'a', a int"),
        ({"stem.weight": torch.full((3,), torch.nan)}, "are not finite"),
    ],
)
def test_a_file_without_usable_weights_is_refused(tmp_path, content, said):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=said):
        initialize(timm.create_model("test_resnet", num_classes=3), tmp_path / "weights.pth")


def test_of_two_checkpoints_the_best_is_taken(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("best.ckpt", "last.ckpt"):
        (tmp_path / "checkpoints" / name).touch()
    assert weights_file(tmp_path).name == "best.ckpt"

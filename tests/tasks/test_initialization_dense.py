import pytest
import timm
import torch

from linvit.models.dense.frameworks import build_dense
from linvit.tasks.initialization import initialize

HEADS = {"width": 16}


def segmentor(classes=5, seed=0, backbone="ravlt_nano"):
    torch.manual_seed(seed)
    return build_dense("semantic_fpn", backbone, classes, HEADS)


def detector(classes=5, seed=0):
    torch.manual_seed(seed)
    return build_dense("mask_rcnn", "ravlt_nano", classes, HEADS | {"hidden": 32})


def changed(network, before):
    return {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}


def copied(network):
    return {key: value.clone() for key, value in network.state_dict().items()}


NARROW = {"channels": (8, 8, 16, 16)}


def of_timm():
    return build_dense("semantic_fpn", "resnet18", 5, HEADS, **NARROW)


@pytest.mark.parametrize("build", [segmentor, detector, of_timm])
def test_a_classifier_gives_the_backbone_alone(build, tmp_path):
    torch.manual_seed(9)
    name, options = ("resnet18", NARROW) if build is of_timm else ("ravlt_nano", {})
    classifier = timm.create_model(name, num_classes=7, **options).state_dict()
    torch.save(classifier, tmp_path / "weights.pth")
    network = build()
    before = copied(network)
    said = initialize(network, tmp_path / "weights.pth")
    assert said.endswith("weights.pth: its backbone; neck and heads keep their initial weights.")
    ours, prefix = network.state_dict(), f"{network.backbone_prefix}body."
    assert all(key.startswith(prefix) for key in changed(network, before))
    shared = [key for key in classifier if prefix + key in ours]
    assert len(shared) > 50
    assert all(torch.equal(ours[prefix + key], classifier[key]) for key in shared)


def test_a_detector_gives_a_segmentor_its_backbone(tmp_path):
    trained, network = detector(seed=5), segmentor()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    before = copied(network)
    assert initialize(network, tmp_path / "weights.pth").endswith(
        ": its backbone; neck and heads keep their initial weights."
    )
    theirs = trained.backbone.body.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in network.backbone.state_dict().items())
    assert changed(network, before) <= {f"backbone.{key}" for key in theirs}


@pytest.mark.parametrize("build", [segmentor, detector])
def test_a_whole_network_gives_everything(build, tmp_path):
    trained, network = build(seed=5), build()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    assert initialize(network, tmp_path / "weights.pth").endswith("weights.pth, heads included.")
    assert not changed(network, trained.state_dict())


@pytest.mark.parametrize("build", [segmentor, detector])
def test_layers_of_other_classes_keep_their_initial_weights(build, tmp_path):
    trained, network = build(8, seed=5), build()
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    before = copied(network)
    assert "without the layers for other classes" in initialize(network, tmp_path / "weights.pth")
    ours, theirs = network.state_dict(), trained.state_dict()
    initial = {key for key in ours if ours[key].shape != theirs[key].shape}
    expected = {"classifier"} if build is segmentor else {"classifier", "boxes", "logits"}
    assert {part for part in expected for key in initial if part in key} == expected
    assert all(torch.equal(ours[key], before[key]) for key in initial)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours if key not in initial)


def test_a_run_gives_its_weights_by_the_same_rules(tmp_path):
    trained, network = segmentor(seed=5), segmentor()
    held = {f"network.{key}": value for key, value in trained.state_dict().items()}
    (tmp_path / "checkpoints").mkdir()
    torch.save({"linvit": {}, "state_dict": held}, tmp_path / "checkpoints" / "best.ckpt")
    assert initialize(network, tmp_path).endswith("best.ckpt, heads included.")
    assert not changed(network, trained.state_dict())

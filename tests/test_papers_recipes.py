"""What the papers' recipes come to: the values that the released training code runs with."""

import re
from pathlib import Path

import pytest
import timm
import torch
from imagenet_folder import write_imagenet
from torch import nn

from evidence.published import PUBLISHED, ROWS
from linvit.bundled import header
from linvit.data.images import ImageFolder
from linvit.models.backbone import Backbone
from linvit.models.by_name import create_classifier
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit.tasks.optimization import Optimizer, Schedule

RECIPES = Path(__file__).parents[1] / "recipes"
ALL = [tuple(name.split("_")) for name in PUBLISHED if re.fullmatch("(ravlt|mavit|care)_.*", name)]
PYRAMID = {"global_batch": 1024, "peak": 1e-3, "epochs": 300, "warmup": 5, "cooldown": 0, "repeats": 3}
CARE = {"global_batch": 1536, "peak": 2.5e-3, "epochs": 310, "warmup": 20, "cooldown": 10, "repeats": 1}
EXPECTED = {"ravlt": PYRAMID, "mavit": PYRAMID, "care": CARE}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data"), train=1, val=(1, 1, 1))


def path_of(family, size):
    return RECIPES / family / f"{size}_imagenet_300e.yaml"


@pytest.fixture(params=ALL, ids="-".join)
def recipe(request):
    family, size = request.param
    return family, size, Recipe(read_recipe(path_of(family, size))).resolved()


def test_runs_of_several_recipes_have_folders_of_their_own():
    assert len({read_recipe(path_of(family, size))["folder"] for family, size in ALL}) == len(ALL)


def test_every_size_that_a_paper_publishes_has_a_recipe():
    found = {(path.parent.name, path.name) for path in RECIPES.rglob("*_imagenet_300e.yaml")}
    assert found == {(family, f"{size}_imagenet_300e.yaml") for family, size in ALL}
    assert len(ALL) == 11


def test_header_names_the_published_accuracy(recipe):
    family, size, _ = recipe
    said = header(path_of(family, size))
    published = PUBLISHED[f"{family}_{size}"]
    assert said["published"].startswith(f"top-1 {published.top1} % ({published.source}, ")
    assert said["ours"] == "not run yet"


def stochastic_depth(family, size):
    """As published; CARE's paper does not state it, and 0.1 is that of the released script for S0."""
    if family == "care":
        return 0.1
    source, label = {"ravlt": ("RALA", "RAVLT"), "mavit": ("MALA", "MAViT")}[family]
    return float(ROWS[f"{source}, Section 4.1, {label}-{size[0].upper()}"].values["stochastic depth"])


def test_model_and_stochastic_depth(recipe):
    family, size, values = recipe
    assert values["model"] == {"name": f"{family}_{size}", "drop_path_rate": stochastic_depth(family, size)}
    with torch.device("meta"):
        network = create_classifier(values["model"], 1000, 3)
    assert isinstance(network, Backbone)
    assert network.pattern == ("CCLL" if family == "care" else "LLSS")
    rates = [module.drop_prob for module in network.modules() if hasattr(module, "drop_prob")]
    assert max(rates) == pytest.approx(stochastic_depth(family, size))


def test_learning_rate_over_the_epochs(recipe):
    family, _, values = recipe
    expected = EXPECTED[family]
    network = nn.Linear(4, 4)
    optimizer = Optimizer(**values["optimizer"]).build(network, expected["global_batch"])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["eps"] == 1e-8
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
    epochs = values["trainer"]["max_epochs"]
    assert epochs == expected["epochs"]
    schedule = Schedule(**values["schedule"]).build(optimizer, 10 * epochs, 10)
    rates = []
    for step in range(10 * epochs):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == 1e-6
    assert rates[5 * expected["warmup"]] == pytest.approx((expected["peak"] + 1e-6) / 2)
    assert rates[1500] == pytest.approx((expected["peak"] + 1e-5) / 2)  # the cosine's middle is epoch 150 for all
    cooled = 10 * expected["cooldown"]
    assert rates[-cooled - 1] == pytest.approx(1e-5, rel=0.02)
    assert rates[-cooled:] == [1e-5] * cooled or not cooled


def test_regularization(recipe):
    family, _, values = recipe
    task = values["task"]
    mixing = {key: task[key] for key in ("label_smoothing", "mixup", "cutmix", "mix_probability", "mix_switch")}
    assert mixing == {
        "label_smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "mix_probability": 1.0,
        "mix_switch": 0.5,
    }
    if family == "care":
        assert task["ema_decay"] is None
        hard = {"kind": "hard", "temperature": 1.0, "weight": 0.5}
        assert values["distillation"] == {"teacher": "regnety_160.deit_in1k", "checkpoint": None, **hard}
        assert timm.get_pretrained_cfg("regnety_160.deit_in1k").num_classes == 1000
    else:
        assert task["ema_decay"] ** (1024 / task["ema_batch"]) == pytest.approx(0.99992, abs=1e-7)
        assert not task["ema_warmup"]
        assert values["distillation"]["teacher"] is None


def test_data_and_augmentation(recipe, tiny):
    family, _, values = recipe
    data = values["data"]
    assert (data["name"], data["size"], data["batch_size"]) == ("imagefolder", 224, 128)
    assert data["repeats"] == EXPECTED[family]["repeats"]
    assert data["crop_scale"] == [0.08, 1.0]
    assert data["interpolation"] == "bicubic"
    options = {key: value for key, value in data.items() if key not in ("name", "root")}
    shown = str(ImageFolder(str(tiny), **options).train_transform())
    assert shown.count("AugmentOp") == 15
    assert "RandomErasing(p=0.25, mode=pixel, count=(1, 1))" in shown
    assert "RandomHorizontalFlip(p=0.5)" in shown
    assert ("bilinear bicubic" if family == "care" else "interpolation=bicubic") in shown


def test_trainer(recipe):
    family, _, values = recipe
    trainer = values["trainer"]
    assert trainer["precision"] == ("32-true" if family == "care" else "16-mixed")
    assert trainer["sync_batchnorm"] == (family != "care")
    assert trainer["gradient_clip_val"] is None
    assert values["seed"] == (42 if family == "care" else 0)

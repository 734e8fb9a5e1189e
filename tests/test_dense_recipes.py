"""What the recipes of detectors and segmentors come to: the values that the released configurations have."""

from pathlib import Path

import pytest
from test_papers_recipes import stochastic_depth

from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe

DENSE = Path(__file__).parents[1] / "recipes" / "dense"
ALL, LONG = ("tiny", "small", "base", "large"), ("small", "base", "large")
ADE20K_IMAGES, GPUS = 20_210, 8
RATE = {  # learning rate at its batch of 8 processes, weight decay, what is spared of it
    "retinanet_coco_12e": (1e-4, 1e-4, "none"),
    "mask_rcnn_coco_12e": (1e-4, 0.05, "norms"),
    "mask_rcnn_coco_36e": (1e-4, 0.05, "norms"),
    "cascade_mask_rcnn_coco_36e": (1e-4, 0.05, "norms"),
    "semantic_fpn_ade20k_80k": (1e-4, 1e-4, "none"),
    "upernet_ade20k_160k": (6e-5, 0.01, "norms"),
}
SIZES = {
    "retinanet_coco_12e": ALL,
    "mask_rcnn_coco_12e": ALL,
    "mask_rcnn_coco_36e": LONG,
    "cascade_mask_rcnn_coco_36e": LONG,
    "semantic_fpn_ade20k_80k": ALL,
    "upernet_ade20k_160k": ALL,
}
CARE = ("mask_rcnn_coco_12e", "semantic_fpn_ade20k_80k")
ROWS = [(folder, family, size) for folder in SIZES for family in ("ravlt", "mavit") for size in SIZES[folder]]
ROWS += [(folder, "care", size) for folder in CARE for size in ("s0", "s1", "s2")]


def values_of(folder, family, size):
    return Recipe(read_recipe(DENSE / folder / f"{family}_{size}.yaml")).resolved()


def test_every_row_of_the_papers_tables_has_a_recipe():
    files = {str(path.relative_to(DENSE)) for path in DENSE.rglob("*.yaml") if path.parent.name in SIZES}
    wanted = {f"{folder}/{family}_{size}.yaml" for folder, family, size in ROWS}
    assert files == wanted | {f"{folder}/base.yaml" for folder in SIZES}


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_network_optimizer_and_batch(row):
    folder, family, size = row
    values = values_of(*row)
    assert values["model"]["framework"] == folder.partition("_coco")[0].partition("_ade20k")[0]
    assert values["model"]["backbone"] == f"{family}_{size}"
    assert values["model"]["drop_path_rate"] == stochastic_depth(family, size)
    optimizer, batch = values["optimizer"], GPUS * values["data"]["batch_size"]
    rate, decay, spared = RATE[folder]
    if family == "care":
        rate, expected = 2e-4, {"mask_rcnn_coco_12e": 24, "semantic_fpn_ade20k_80k": 48}[folder]
        assert batch == expected
    else:
        assert batch == 16
    assert optimizer["lr"] * batch / (optimizer["lr_batch"] or batch) == pytest.approx(rate)
    assert (optimizer["weight_decay"], optimizer["not_decayed"]) == (decay, spared)


@pytest.mark.parametrize("folder", SIZES)
def test_length_schedule_and_data(folder):
    values = values_of(folder, "ravlt", "small")
    schedule, data, epochs = values["schedule"], values["data"], values["trainer"]["max_epochs"]
    assert values["trainer"]["sync_batchnorm"] is True
    if "coco" in folder:
        assert epochs == int(folder.rpartition("_")[2].rstrip("e"))
        assert schedule["name"] == "steps"
        assert list(schedule["decay_epochs"]) == {12: [8, 11], 36: [27, 33]}[epochs]
        assert (schedule["warmup_steps"], schedule["warmup_lr"]) == (500, 1e-7)
        assert (data["long_side"], data["short_side"], data["flip"]) == (1333, 800, 0.5)
        assert data["resizing"] == {12: "single", 36: "detr"}[epochs]
        assert data["needs_masks"] is not folder.startswith("retinanet")
    else:
        steps = 1000 * int(folder.rpartition("_")[2].rstrip("k"))
        assert steps <= ADE20K_IMAGES // 16 * epochs <= 1.011 * steps
        assert schedule["name"] == "poly"
        assert schedule["power"] == {80_000: 0.9, 160_000: 1.0}[steps]
        assert (data["long_side"], data["short_side"], data["crop"]) == (2048, 512, [512, 512])
        assert (data["cat_max_ratio"], data["ratio"]) == (0.75, [0.5, 2.0])


def test_care_s_segmentation_takes_forty_thousand_steps():
    epochs = values_of("semantic_fpn_ade20k_80k", "care", "s0")["trainer"]["max_epochs"]
    assert abs(ADE20K_IMAGES // 48 * epochs - 40_000) < 100

"""The ablation recipes and the page about them: what each changes, and that its numbers are those of its network."""

import re
from pathlib import Path

import pytest
import timm
from imagenet_folder import write_imagenet
from tiny_dense import HEADS, SIZE, tiny_scenes

from evidence.published import ROWS
from linvit.bundled import header
from linvit.models.by_name import create_classifier
from linvit.runs.listing import compare_recipes
from linvit.runs.recipe_values import base_of, read_recipe
from linvit.runs.training import train_folder
from linvit_cli import main

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*/ablations/*.yaml"))
DENSE = sorted((ROOT / "recipes" / "dense").glob("*/ablations/*.yaml"))
PAGE = (ROOT / "docs" / "reference" / "ablations.md").read_text()
CHEAP = ("s0_no_interaction2",)
named = {"ids": lambda path: str(path.relative_to(ROOT / "recipes"))}


def counted(path):
    """Parameters, and MACs without and with attention products in G, as the header has them."""
    line = next(line for line in path.read_text().splitlines() if line.startswith("# size: "))
    pattern = r"# size: ([\d,]+) parameters, (\d+\.\d{3}) G MACs \+ (\d+\.\d{3}) G in attention products"
    return re.fullmatch(pattern, line).groups()


def in_giga(macs):
    return f"{macs / 1e9:.3f}"


@pytest.mark.parametrize("path", RECIPES, **named)
def test_header_has_the_parameters_of_the_network(path):
    network = create_classifier({**read_recipe(path)["model"], "device": "meta"}, 1000, 3)
    assert counted(path)[0] == f"{sum(parameter.numel() for parameter in network.parameters()):,}"


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path.stem in CHEAP else pytest.mark.slow) for path in RECIPES], **named
)
def test_header_has_the_macs_of_the_network(path):
    (row,) = compare_recipes([path])
    assert counted(path) == (f"{row['parameters']:,}", in_giga(row["macs"]), in_giga(row["macs_attention"]))


def test_recipes_change_the_model_of_their_base_alone():
    for path in RECIPES:
        ours, base = read_recipe(path), read_recipe(base_of(path))
        model, below = ours.pop("model"), base.pop("model")
        assert base_of(path).name == f"{path.name.partition('_')[0]}_imagenet_300e.yaml"
        assert below.items() < model.items(), path
        assert ours.pop("folder") == f"runs/{path.parent.parent.name}_{path.stem}"
        base.pop("folder")
        assert ours == base, path


def classifier_of(path):
    """The recipe whose run a detector or segmentor with an ablated backbone starts from."""
    family, _, change = path.stem.partition("_tiny_")
    return ROOT / "recipes" / family / "ablations" / f"tiny_{change}.yaml"


def test_every_ablated_row_with_dense_measures_has_a_recipe_for_each():
    bases = ("RAVLT-T", "MAViT-T", "ELU + 1")  # with recipes of their own
    tables = {"RALA, Table 9", "MALA, Table 10", "MALA, Table 11"}
    rows = {name: row.values for name, row in ROWS.items() if row.table in tables and row.name not in bases}
    published = [header(path)["published"] for path in DENSE]
    for quantity in ("box AP", "mask AP", "mIoU"):
        wanted = sorted(name for name, values in rows.items() if quantity in values)
        assert sorted(re.search(r"\((.*)\)", text)[1] for text in published if quantity in text) == wanted


@pytest.mark.parametrize("path", DENSE, **named)
def test_backbone_is_that_of_the_ablated_classifier(path):
    ours, base, classifier = (read_recipe(file) for file in (path, base_of(path), classifier_of(path)))
    model = classifier["model"]
    assert model.pop("name") == base["model"]["backbone"]
    assert ours.pop("model") == {**base.pop("model"), **model}
    assert ours.pop("init") == classifier["folder"]
    assert ours.pop("folder") == f"{base.pop('folder').rpartition('_')[0]}_tiny_{path.stem.partition('_tiny_')[2]}"
    assert ours == base


@pytest.mark.parametrize(
    ("folder", "stem"),
    [
        pytest.param("mask_rcnn_coco_12e", "ravlt_tiny_no_output_augmentation", marks=pytest.mark.slow),
        ("semantic_fpn_ade20k_80k", "mavit_tiny_learned_beta_gamma"),
    ],
)
def test_a_dense_ablation_starts_from_the_run_of_its_classifier(folder, stem, tmp_path, monkeypatch):
    path = ROOT / "recipes" / "dense" / folder / "ablations" / f"{stem}.yaml"
    trainer = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "accelerator": "cpu"}
    trainer |= {"precision": "32-true", "sync_batchnorm": False}
    data, nano = {"batch_size": 2, "num_workers": 0}, f"{stem.partition('_')[0]}_nano"
    images = write_imagenet(tmp_path / "images", 1, (1, 1, 1))
    scenes = tiny_scenes(tmp_path / "scenes", 2, 1) / ("detection" if "coco" in folder else "segmentation")
    size = {"long_side": SIZE, "short_side": SIZE} | ({} if "coco" in folder else {"crop": [SIZE, SIZE]})
    model = {"backbone": nano, "heads": HEADS[read_recipe(path)["model"]["framework"]]}
    monkeypatch.chdir(tmp_path)
    first = {"model": {"name": nano}, "data": {**data, "size": 32, "root": str(images)}, "trainer": trainer}
    train_folder(classifier_of(path), first)
    run = train_folder(path, {"model": model, "data": {**data, **size, "root": str(scenes)}, "trainer": trainer})
    assert (run / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize(
    ("name", "text"),
    [("ravlt_tiny", "no_output_augmentation"), ("ravlt_tiny", "no_augmentation")],
)
def test_widened_feed_forward_gives_back_the_parameters(name, text):
    path = ROOT / "recipes" / "ravlt" / "ablations" / f"tiny_{text}.yaml"
    base = sum(parameter.numel() for parameter in timm.create_model(name, device="meta").parameters())
    assert int(counted(path)[0].replace(",", "")) - base == -50
    assert "50 fewer\n# than the base's 14,897,768" in path.read_text()


def rows_of_the_page():
    return {cells[0]: cells[1:] for cells in (
        [cell.strip() for cell in line.strip("| \n").split("|")] for line in PAGE.splitlines() if "recipes/" in line
    ) if cells[0].endswith(".yaml") and len(cells) == 7}  # fmt: skip


def test_page_lists_every_recipe_with_the_numbers_of_its_header():
    rows = rows_of_the_page()
    assert {path for path in rows if "ablations" in path} == {str(path.relative_to(ROOT)) for path in RECIPES}
    for path in RECIPES:
        parameters, _, macs, _, attention, published = rows[str(path.relative_to(ROOT))]
        assert (parameters, macs, attention) == tuple(
            f"{x}{unit}" for x, unit in zip(counted(path), ("", " G", " G"), strict=True)
        )
        assert f"# published: {published}     ours: not run yet\n" in path.read_text()


@pytest.mark.slow
def test_page_holds_what_its_commands_print(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    sections = re.findall(r"```sh\nlinvit (models --recipes .*)\n```\n\n((?:\|.*\n)+)", PAGE)
    assert len(sections) == 3
    for command, table in sections:
        assert main(command.split()) == 0
        printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert printed == table.splitlines()

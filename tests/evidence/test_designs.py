"""Designs of trainings without a GPU: rules for rates and epochs, verdicts from a ledger, shared images, pieces."""

from argparse import Namespace
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
from design_ledger import full, write_ledger
from PIL import Image

pytest.importorskip("triton", reason="the queue of jobs needs Triton")

from evidence import design_page
from evidence.design import SWEEP_SEEDS, read
from evidence.designs import DESIGNS, REFEREE
from evidence.gpu import cifar, data, published
from evidence.gpu import trainings as job
from linvit.data.images.folder import ImageFolder
from linvit.data.images.small import Cifar
from linvit.runs.recipe_values import read_recipe

SWEPT, VARIANTS = REFEREE.swept, REFEREE.variants


@pytest.fixture
def referee(tmp_path):
    return replace(REFEREE, folder=tmp_path)


def sweep(design, by_rate):
    shares = {(name, rate, seed): by_rate(rate) for name in VARIANTS for rate in SWEPT for seed in SWEEP_SEEDS}
    write_ledger(design.rates, {f"{name} at {rate} seed {seed}": share for (name, rate, seed), share in shares.items()})


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
def test_variants_differ_in_the_model_alone(design):
    recipes = [read_recipe(design.recipes / f"{name}.yaml") for name in design.variants]
    for recipe in recipes:
        assert {**recipe, "model": 0, "folder": 0} == {**recipes[0], "model": 0, "folder": 0}
    assert {path.stem for path in design.recipes.glob("*.yaml")} == {*design.variants, "base"}
    values = recipes[0]
    every = values["trainer"].get("check_val_every_n_epoch", 1)
    for epochs in (design.sweep_epochs, *design.shown, *(count for _, count in design.pace)):
        assert epochs % every == 0
    assert values["trainer"]["max_epochs"] == design.pace[0][1]
    assert max(design.shown) < design.pace[0][1]
    assert values["trainer"]["gradient_clip_val"] == values["task"]["cutmix"] == 1
    assert values["data"]["root"] == f"data/{design.data}"


def test_designs_have_seeds_of_their_own_and_claims_the_first_of_both():
    seeds = [{*design.planned(name)} for design in DESIGNS.values() for name in design.variants]
    assert min(map(min, seeds)) == 100
    by_design = [set().union(*(design.planned(name) for name in design.variants)) for design in DESIGNS.values()]
    assert len(set().union(*by_design)) == sum(map(len, by_design))
    assert len(REFEREE.claims) <= 8
    assert sum(len(design.claims) for design in DESIGNS.values() if design is not REFEREE) <= 8
    for design in DESIGNS.values():
        assert [stage.seeds for stage in design.stages][1:] == [seeds for _, seeds in design.seeds]
        for claim in design.claims:
            first, second = map(design.planned, claim.pair)
            common = design_page.seeds_of(design, claim)
            assert first[: len(common)] == second[: len(common)] == common
            assert len(common) >= (16 if design is REFEREE else 12)


def test_runs_of_one_seed_train_together_where_images_are_made_just_ahead():
    for design in DESIGNS.values():
        for stage in design.stages[1:]:
            assert 0 < stage.workers <= design.workers
            assert design.ahead is None or stage.workers % len(stage.variants) == 0


def test_a_sweep_grows_until_the_best_has_two_rates_on_either_side():
    assert REFEREE.to_try("mala", {}) == list(SWEPT)
    inner = {rate: [0.5, 0.5] for rate in SWEPT} | {"2e-3": [0.6, 0.5]}
    assert REFEREE.to_try("mala", {"mala": inner}) == list(SWEPT)
    edge = {rate: [0.5, 0.5] for rate in SWEPT} | {"8e-3": [0.6, 0.6]}
    assert REFEREE.to_try("mala", {"mala": edge}) == [*SWEPT, "16e-3", "32e-3"]
    high = edge | {"16e-3": [0.7, 0.7], "32e-3": [0.8, 0.8]}
    assert REFEREE.to_try("mala", {"mala": high})[-1] == "32e-3"  # as far as its ladder goes
    assert DESIGNS["parts"].to_try("care", {"care": high})[-1] == "64e-3"
    low = inner | {"5e-4": [0.7, 0.7]}
    assert REFEREE.to_try("mala", {"mala": low}) == ["1.25e-4", "2.5e-4", *SWEPT]
    half = {rate: [0.5] for rate in SWEPT}
    assert REFEREE.best_of(half) is None


def test_the_lower_of_two_equal_rates_is_chosen_once_all_are_there(referee):
    sweep(referee, lambda rate: 0.6 if rate in ("1e-3", "2e-3") else 0.5)
    assert referee.best_rates() == {}  # 1e-3 has one rate below it
    rows = read(referee.rates)
    more = {f"{name} at 2.5e-4 seed {seed}": 0.4 for name in VARIANTS for seed in SWEEP_SEEDS}
    write_ledger(referee.rates, {run: row["result"]["inside"]["last"] for run, row in rows.items()} | more)
    assert set(referee.best_rates().values()) == {"1e-3"}
    assert "**60.0**" in design_page.rates_table(referee)


def test_a_stage_needs_the_sweep_and_takes_its_rates(referee, tmp_path):
    stage = replace(referee.stages[1], seeds=range(100, 102))
    with pytest.raises(ValueError, match="The rates of 11 variants are not known yet"):
        stage.trainings()
    sweep(referee, lambda rate: None if rate == "8e-3" else 0.6 if rate == "2e-3" else 0.5)
    runs = stage.trainings()
    assert [run.label for run in runs[:2]] == ["mala seed 100", "mala_blocks seed 100"]
    assert len(runs) == 2 * len(VARIANTS)
    for run in runs:
        assert (run.values["optimizer"]["lr"], run.values["trainer"]["max_epochs"]) == (2e-3, 30)
        on_card = job.on_card(run, tmp_path, tmp_path)
        assert on_card.values == run.values  # so that the ledger holds on every machine
        assert {*on_card.overrides} > {*run.overrides}


@pytest.mark.parametrize(("seconds", "epochs"), [(100.0, 30), (300.0, 20), (1000.0, 10)])
def test_epochs_follow_the_pace_of_the_sweep(referee, seconds, epochs):
    sweep(referee, lambda rate: 0.5)
    referee.rates.write_text(referee.rates.read_text().replace('"seconds": 100.0', f'"seconds": {seconds}'))
    assert referee.epochs() == epochs


def outcomes(design):
    return [line.split(" | ")[-1].removesuffix(" |") for line in design_page.claims_table(design).splitlines()[2:]]


def test_verdicts(referee):
    assert outcomes(referee) == ["not run yet"] * 8
    write_ledger(referee.ledger, full({"mala_blocks": 0.82, "mhla": 0.79, "vittt": 0.803}))
    equal = "equal, within ±0.5"
    found = outcomes(referee)
    assert found[:6] == ["at least 1 point more", equal, equal, equal, equal, "worse"]
    assert found[6] == f"better; {equal}"
    write_ledger(referee.ledger, full({"mala_blocks": 0.807}))
    assert outcomes(referee)[0] == "undecided"
    write_ledger(referee.ledger, full({}, deviation=0.02))
    assert outcomes(referee) == ["undecided"] * 8


def test_no_verdict_before_all_seeds_of_the_family(referee):
    write_ledger(referee.ledger, full({"mala_blocks": 0.82}, but=("mhla seed 115",)))
    found = outcomes(referee)
    assert found[0] == "at least 1 point more"
    assert found[5] == "15 of 16 seeds"
    assert found[1] == "20 of 20 seeds"
    write_ledger(referee.ledger, full({}) | {f"mala_blocks seed {seed}": None for seed in range(100, 106)})
    assert outcomes(referee)[0] == "undecided: too many runs diverged"
    assert "| 6 |" in design_page.results_table(referee)


@pytest.mark.parametrize(("name", "plain_source"), [("referee", Cifar), ("patterns", ImageFolder)])
def test_prepared_images_are_those_of_linvit_train(tmp_path, name, plain_source):
    design = replace(DESIGNS[name], settings=("data.batch_size=8", "data.size=32"), folder=tmp_path)
    job.write_noise(design, tmp_path / "data")
    run = replace(design.stages[0], variants=design.variants[:1]).trainings()[-1]
    root = job.root_of(run, tmp_path / "data")
    run.values["data"]["root"] = str(root)
    assert root == tmp_path / "data" / ("train" if name == "patterns" else "")
    folder = tmp_path / "made"
    for epoch in (0, 1):
        job.prepare(run, epoch, folder)
    settings = {key: value for key, value in run.values["data"].items() if key != "name"} | {"seed": run.values["seed"]}
    kind = job.PREPARED_SOURCES[run.values["data"]["name"]]
    plain, prepared = plain_source(**settings), kind(cache=str(folder), **settings)
    for epoch in (0, 1):
        pairs = []
        for source in (plain, prepared):
            loader = source.train_dataloader()
            loader.sampler.set_epoch(epoch)
            pairs.append(list(loader))
        for (images, targets), (made, same) in zip(*pairs, strict=True):
            torch.testing.assert_close(made, images, rtol=2**-10, atol=2**-24)  # rounded once to float16
            assert torch.equal(targets, same)
        assert len(pairs[0]) == (5 if name == "referee" else 2)
    resumed = kind(cache=str(folder), **settings)
    resumed.load_state_dict({"reached": (1, 1)})
    loader = resumed.train_dataloader()
    loader.sampler.set_epoch(1)
    for (images, _), (again, _) in zip(pairs[1][1:], loader, strict=True):
        assert torch.equal(images, again)
    kept = prepared.val_set()
    assert kept[0][0] is kept[0][0]
    assert torch.equal(kept[0][0], plain.val_set()[0][0])
    assert len(kept) == len(plain.val_set())


def test_images_are_made_just_ahead_of_the_slowest_run(tmp_path, referee):
    sweep(referee, lambda rate: 0.6 if rate == "2e-3" else 0.5)
    runs = [
        replace(run, folder=tmp_path / run.label)
        for run in replace(referee.stages[1], variants=("mala", "rala"), seeds=range(100, 101)).trainings()
    ]
    assert job.window(runs, None) == (0, 30)
    assert job.window(runs, 2) == (0, 3)
    for run, epochs in zip(runs, (9, 6), strict=True):
        run.folder.mkdir()
        (run.folder / "metrics.csv").write_text("epoch\n" + "0\n" * epochs)
    assert job.window(runs, 2) == (5, 9)  # the seventh epoch runs, and after a stop the sixth may again
    (runs[1].folder / "result.json").touch()
    assert job.window(runs, 2) == (8, 12)
    (runs[0].folder / "result.json").touch()
    first, behind = job.window(runs, 2)
    assert first >= behind == 30


def test_only_epochs_in_the_windows_of_the_first_groups_are_asked_for_and_kept(tmp_path, referee):
    sweep(referee, lambda rate: 0.6 if rate == "2e-3" else 0.5)
    groups, asked, stop = {}, [], Event()
    for name, run, epochs in zip(
        "abcd", replace(referee.stages[1], variants=("mala",)).trainings(), (30, 4, 0, 0), strict=True
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("epoch\n" + "0\n" * epochs)
        groups[name] = [replace(run, folder=tmp_path / name)]
    (tmp_path / "a" / "result.json").touch()
    for epoch in range(4):
        (tmp_path / "b" / f"{epoch}.npy").touch()
    (tmp_path / "a" / "29.npy").touch()
    pool = Namespace(submit=lambda function, run, epoch, folder: asked.append((folder.name, epoch)))
    stop.set()
    job.keep_ahead(groups, pool, 2, 2, tmp_path, stop)
    assert sorted(asked) == [("b", 3), ("b", 4), ("b", 5), ("b", 6), ("c", 0), ("c", 1), ("c", 2)]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.npy")] == ["b/3.npy"]


def test_what_a_killed_command_left_is_removed_and_finished_runs_ask_for_nothing(tmp_path, referee):
    sweep(referee, lambda rate: 0.6 if rate == "2e-3" else 0.5)
    stage = replace(referee.stages[1], variants=("mala",))
    write_ledger(referee.ledger, {f"mala seed {seed}": 0.8 for seed in stage.seeds})
    torn = tmp_path / "prepared" / "seed 100, held out 0" / ".3.99"
    torn.parent.mkdir(parents=True)
    torn.touch()
    with job.augmented(stage, tmp_path, 1, tmp_path / "prepared"):
        pass
    assert not list(torn.parent.iterdir())


def test_the_page_says_what_a_stage_costs_and_how_far_it_is(tmp_path):
    design = replace(DESIGNS["patterns"], folder=tmp_path)
    table = design_page.stages_table(design)
    assert "| `patterns_120` | 10 × 4 seeds × 45 epochs | 17.0 | 14 | not run yet |" in table
    assert design_page.results_table(design) == design_page.NOT_RUN
    write_ledger(design.ledger, {"softmax seed 120": 0.8, "softmax seed 121": 0.81})
    assert "| 2 of 40 runs |" in design_page.stages_table(design)


def test_the_margin_of_equality_is_the_designs_own(tmp_path):
    design = replace(DESIGNS["parts"], folder=tmp_path)
    draw = np.random.default_rng(0)
    runs = {f"{name} seed {seed}" for name in design.variants for seed in design.planned(name)}
    write_ledger(design.ledger, {run: 0.8 + 0.003 * draw.standard_normal() for run in sorted(runs)})
    assert outcomes(design) == ["equal, within ±1"] * len(design.claims)
    assert outcomes(replace(design, within=0.2)) == ["undecided"] * len(design.claims)


def test_a_run_waits_for_images_and_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "PATIENCE", 0.0)
    with pytest.raises(TimeoutError, match=r"0.npy has not been made in 0 s"):
        job.waited_for(tmp_path / "0.npy")


def test_a_clone_becomes_an_archive_and_binary_files(tmp_path):
    draw = np.random.default_rng(0)
    for split, count in (("train", 5), ("test", 1)):
        for name in ("cat", "dog"):
            for number in range(count):
                path = tmp_path / "clone" / split / name / f"{number:04}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    archive = tmp_path / "gpu" / "cifar.tar.xz"
    with pytest.raises(FileNotFoundError, match="python -m evidence run cifar"):
        cifar.unpacked(tmp_path / "there", archive)
    assert "MiB" in cifar.carry(tmp_path / "clone", tmp_path / "here", archive)
    assert cifar.unpacked(tmp_path / "there", archive) == tmp_path / "there"
    here, there = (Cifar(str(tmp_path / name)).images("train", np.asarray) for name in ("here", "there"))
    assert np.array_equal(here.pixels, there.pixels)
    assert here.targets.tolist() == [0, 1] * 5
    with Image.open(tmp_path / "clone" / "train" / "dog" / "0003.jpg") as image:
        assert np.array_equal(here[7][0], np.asarray(image))


@pytest.mark.parametrize(("seconds", "epochs"), [(4.0, 80), (6.9, 45), (100.0, 5), (0.1, 300)])
def test_a_published_size_is_trained_for_the_epochs_that_fit(seconds, epochs):
    assert published.epochs_within(320.0, seconds) == epochs


def test_the_pace_of_a_published_size_is_that_of_epochs_without_evaluation():
    plain = [{"seconds": 2.0, "step": 73, "train_loss": 1.0}] * 5
    evaluated = {"seconds": 50.0, "step": 438, "train_loss": 0.9, "top1": 0.5, "ema_top1": 0.6, "val_loss": 1.0}
    result = published.row("mavit_tiny", [*plain, evaluated])
    (cells,) = result["cells"]
    assert cells["images/s with the loader"] == 73 * 128 / 2
    assert (cells["top-1, %"], cells["of the average, %"], cells["epochs"]) == (50, 60, 6)
    assert result["curve"][-1]["ema_top1"] == 0.6


def write_images(folder, names, size):
    draw = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)).save(path)


def test_images_travel_in_pieces(tmp_path, monkeypatch):
    clone, pieces = tmp_path / "clone", tmp_path / "pieces"
    names = [f"{split}/{label}/{number}.JPEG" for split in ("train", "val") for label in "ab" for number in range(4)]
    write_images(clone, names, (40, 30))
    pack = replace(data.PACKS["imagenette-128"], side=12)
    monkeypatch.setattr(data, "LARGEST", 8_000)
    with pytest.raises(FileNotFoundError, match="has 0 of 1 pieces of imagenette-128: run `python -m evidence run"):
        pack.unpacked(tmp_path / "there", pieces)
    said = pack.carry(clone, pieces)
    found = pack.pieces(pieces)
    assert len(found) > 1
    assert f"16 images in {len(found)} pieces" in said
    assert all(piece.stat().st_size <= 8_000 for piece in found)
    folder = pack.unpacked(tmp_path / "there", pieces)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.JPEG")) == sorted(names)
    with Image.open(folder / names[3]) as image:
        assert image.size == (12, 16)
    found[0].unlink()
    assert pack.unpacked(folder, pieces) == folder
    with pytest.raises(FileNotFoundError, match=f"{len(found) - 1} of {len(found)} pieces"):
        pack.unpacked(tmp_path / "elsewhere", pieces)
    whole = replace(pack, side=None)
    whole.carry(clone, tmp_path / "whole")
    copied = whole.unpacked(tmp_path / "copied", tmp_path / "whole")
    assert (copied / names[0]).read_bytes() == (clone / names[0]).read_bytes()


def test_every_second_class_of_tiny_imagenet_with_its_validation_images(tmp_path):
    root = tmp_path / "clone" / "tiny-imagenet-200"
    write_images(root, [f"train/n{label}/images/n{label}_0.JPEG" for label in range(4)], (8, 8))
    write_images(root, [f"val/images/val_{number}.JPEG" for number in range(4)], (8, 8))
    (root / "wnids.txt").write_text("n2\nn0\nn1\nn3\n")
    lines = (f"val_{number}.JPEG\tn{number}\t0\t0\t1\t1" for number in range(4))
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    chosen = data.hundred_classes(tmp_path / "clone")
    expected = {f"train/n{label}/n{label}_0.JPEG": f"train/n{label}/images/n{label}_0.JPEG" for label in (0, 2)}
    expected |= {f"val/n{label}/val_{label}.JPEG": f"val/images/val_{label}.JPEG" for label in (0, 2)}
    assert chosen == {place: root / path for place, path in expected.items()}

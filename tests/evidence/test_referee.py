"""The referee without a GPU: rules that choose rates and epochs, verdicts from a ledger, shared augmentation."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("triton", reason="the queue of jobs needs Triton")

from evidence import referee, referee_page
from evidence.gpu import cifar
from evidence.gpu import referee as job
from evidence.referee import SWEEP_SEEDS, SWEPT, VARIANTS, planned
from evidence.referee_page import PRIMARY
from linvit.data.images.small import Cifar
from linvit.runs.recipe_values import read_recipe


def write_ledger(path, results):
    """results: run → accuracy as a share, or None for a run that diverged."""
    lines = []
    for run, share in results.items():
        noted = {} if share is None else {"3": share / 2, "10": share - 0.1, "last": share, "epochs": 30}
        result = {"reason": None if noted else "the loss became nan", "seconds": 100.0, "measures": {}, "inside": noted}
        lines.append(json.dumps({"run": run, "settings": "", "result": result}) + "\n")
    path.write_text("".join(lines))


def sweep(path, by_rate, names=VARIANTS):
    shares = {(name, rate, seed): by_rate(rate) for name in names for rate in SWEPT for seed in SWEEP_SEEDS}
    write_ledger(path, {f"{name} at {rate} seed {seed}": share for (name, rate, seed), share in shares.items()})


def test_variants_differ_in_the_model_alone():
    recipes = [read_recipe(referee.RECIPES / f"{name}.yaml") for name in VARIANTS]
    for recipe in recipes:
        assert {**recipe, "model": 0, "folder": 0} == {**recipes[0], "model": 0, "folder": 0}
        assert {**recipe["model"], "name": 0, "attention": 0} == {**recipes[0]["model"], "name": 0, "attention": 0}
    assert {path.stem for path in referee.RECIPES.glob("*.yaml")} == {*VARIANTS, "base"}


def test_claims_have_the_first_seeds_of_both_from_100_on():
    assert len(PRIMARY) <= 8
    assert planned("mala") == list(range(100, 120))
    for first, second in (claim.pair for claim in PRIMARY):
        seeds = min(planned(first), planned(second), key=len)
        assert planned(first)[: len(seeds)] == planned(second)[: len(seeds)] == seeds
        assert len(seeds) >= 16


def test_a_sweep_grows_until_the_best_has_two_rates_on_either_side():
    assert referee.to_try("mala", {}) == list(SWEPT)
    inner = {rate: [0.5, 0.5] for rate in SWEPT} | {"2e-3": [0.6, 0.5]}
    assert referee.to_try("mala", {"mala": inner}) == list(SWEPT)
    edge = {rate: [0.5, 0.5] for rate in SWEPT} | {"8e-3": [0.6, 0.6]}
    assert referee.to_try("mala", {"mala": edge}) == [*SWEPT, "16e-3", "32e-3"]
    low = inner | {"5e-4": [0.7, 0.7]}
    assert referee.to_try("mala", {"mala": low}) == ["1.25e-4", "2.5e-4", *SWEPT]
    half = {rate: [0.5] for rate in SWEPT}
    assert referee.best_of(half) is None


def test_the_lower_of_two_equal_rates_is_chosen_once_all_are_there(tmp_path):
    rates = tmp_path / "rates-referee.jsonl"
    sweep(rates, lambda rate: 0.6 if rate in ("1e-3", "2e-3") else 0.5)
    assert referee.best_rates(rates) == {}  # 1e-3 has one rate below it
    rows = referee.read(rates)
    more = {f"{name} at 2.5e-4 seed {seed}": 0.4 for name in VARIANTS for seed in SWEEP_SEEDS}
    write_ledger(rates, {run: row["result"]["inside"]["last"] for run, row in rows.items()} | more)
    assert set(referee.best_rates(rates).values()) == {"1e-3"}
    assert "**60.0**" in referee_page.rates_table(rates)


def test_a_stage_needs_the_sweep_and_takes_its_rates(tmp_path):
    stage = referee.Stage("referee_100", seeds=range(100, 102), folder=tmp_path)
    with pytest.raises(ValueError, match="The rates of 11 variants are not known yet"):
        stage.trainings()
    sweep(stage.rates, lambda rate: None if rate == "8e-3" else 0.6 if rate == "2e-3" else 0.5)
    runs = stage.trainings()
    assert [run.label for run in runs[:2]] == ["mala seed 100", "mala_blocks seed 100"]
    assert len(runs) == 2 * len(VARIANTS)
    for run in runs:
        assert (run.values["optimizer"]["lr"], run.values["trainer"]["max_epochs"]) == (2e-3, 30)
        on_card = job.on_card(run, tmp_path, tmp_path)
        assert on_card.values == run.values  # so that the ledger holds on every machine
        assert {*on_card.overrides} > {*run.overrides}


@pytest.mark.parametrize(("seconds", "epochs"), [(100.0, 30), (300.0, 20), (1000.0, 10)])
def test_epochs_follow_the_pace_of_the_sweep(tmp_path, seconds, epochs):
    rates = tmp_path / "rates-referee.jsonl"
    sweep(rates, lambda rate: 0.5)
    rates.write_text(rates.read_text().replace('"seconds": 100.0', f'"seconds": {seconds}'))
    assert referee.epochs_of(rates) == epochs


def outcomes(ledger):
    return [line.split(" | ")[-1].removesuffix(" |") for line in referee_page.claims_table(ledger).splitlines()[2:]]


def full(means, deviation=0.001, but=()):
    draw = np.random.default_rng(0)
    runs = {f"{name} seed {seed}": means.get(name, 0.8) for name in VARIANTS for seed in planned(name)}
    return {run: mean + deviation * draw.standard_normal() for run, mean in runs.items() if run not in but}


def test_verdicts(tmp_path):
    ledger = tmp_path / "referee.jsonl"
    assert outcomes(ledger) == ["not run yet"] * 8
    write_ledger(ledger, full({"mala_blocks": 0.82, "mhla": 0.79, "vittt": 0.803}))
    equal = "equal, within ±0.5"
    found = outcomes(ledger)
    assert found[:6] == ["at least 1 point more", equal, equal, equal, equal, "worse"]
    assert found[6] == f"better; {equal}"
    write_ledger(ledger, full({"mala_blocks": 0.807}))
    assert outcomes(ledger)[0] == "undecided"
    write_ledger(ledger, full({}, deviation=0.02))
    assert outcomes(ledger) == ["undecided"] * 8


def test_no_verdict_before_all_seeds_of_the_family(tmp_path):
    ledger = tmp_path / "referee.jsonl"
    write_ledger(ledger, full({"mala_blocks": 0.82}, but=("mhla seed 115",)))
    found = outcomes(ledger)
    assert found[0] == "at least 1 point more"
    assert found[5] == "15 of 16 seeds"
    assert found[1] == "20 of 20 seeds"
    write_ledger(ledger, full({}) | {f"mala_blocks seed {seed}": None for seed in range(100, 106)})
    assert outcomes(ledger)[0] == "undecided: too many runs diverged"
    assert "| 6 |" in referee_page.results_table(ledger)


def test_prepared_images_are_those_of_linvit_train(tmp_path):
    job.write_noise(tmp_path)
    stage = referee.Stage("toy", ("mala",), settings=(f"data.root={tmp_path}", "data.batch_size=8"), folder=tmp_path)
    run = stage.trainings()[-1]
    folder = tmp_path / "made"
    for epoch in (0, 1):
        job.prepare(run, epoch, folder)
    settings = {key: value for key, value in run.values["data"].items() if key != "name"} | {"seed": run.values["seed"]}
    plain, prepared = Cifar(**settings), job.Prepared(cache=str(folder), **settings)
    for epoch in (0, 1):
        pairs = []
        for source in (plain, prepared):
            loader = source.train_dataloader()
            loader.sampler.set_epoch(epoch)
            pairs.append(list(loader))
        for (images, targets), (made, same) in zip(*pairs, strict=True):
            torch.testing.assert_close(made, images, rtol=2**-10, atol=2**-24)  # rounded once to float16
            assert torch.equal(targets, same)
        assert len(pairs[0]) == 5
    resumed = job.Prepared(cache=str(folder), **settings)
    resumed.load_state_dict({"reached": (1, 3)})
    loader = resumed.train_dataloader()
    loader.sampler.set_epoch(1)
    for (images, _), (again, _) in zip(pairs[1][3:], loader, strict=True):
        assert torch.equal(images, again)


def test_a_run_waits_for_images_and_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "PATIENCE", 0.1)
    with pytest.raises(TimeoutError, match=r"0.npy has not been made in 0.1 s"):
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

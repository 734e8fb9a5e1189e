import json

import pytest
from tiers import slow

from evidence.counts import LISTINGS, model_names, store_networks
from evidence.dense_cost import TABLES
from linvit.bundled import NETWORKS, list_networks
from linvit.runs.tasks import RUNS
from linvit_cli import main
from linvit_cli.models import readable


def test_every_task_lists_rows_with_a_heading_for_each_key():
    rows = [list_networks(family="care")[0], *(list_networks(task)[0] for task in ("recall", "speech", "diffusion"))]
    for row, words in zip(rows, readable(rows), strict=True):
        assert len(words) == len(row.keys() - {"family", "grows"})
        assert all(words.values())
    assert readable(rows)[0]["parameters"] == f"{rows[0]['parameters'] / 1e6:.2f} M"


def test_a_family_or_task_that_does_not_exist_is_refused():
    families = "care, deit_small, deit_tiny, hvittt, mavit, nalaformer, ravlt"
    with pytest.raises(ValueError, match=f"`family` is 'nix', expected one of {families}"):
        list_networks(family="nix")
    with pytest.raises(ValueError, match="`family` is 'care', expected one of mavit, ravlt"):
        list_networks("detection", "care")
    with pytest.raises(ValueError, match="the networks of the task 'speech' have no families"):
        list_networks("speech", "care")
    with pytest.raises(ValueError, match="`task` is 'speach', expected one of classification, "):
        list_networks("speach")


def test_every_framework_is_listed_on_every_size():
    rows = [row for task in ("detection", "segmentation") for row in list_networks(task, "mavit")]
    assert len(rows) == 40
    assert {"framework", "backbone", "parameters", "macs", "macs_attention"} <= rows[0].keys()
    assert {row["framework"] for row in rows} == set(TABLES)
    of_released = [row for row in rows if row["pattern"] == "LLSS" and row["published_macs"]]
    assert len(of_released) == 19


def test_the_stored_rows_name_every_network():
    assert [row["name"] for row in list_networks()] == model_names()
    assert json.loads(NETWORKS.read_text()).keys() == RUNS.keys() == LISTINGS.keys()


@pytest.mark.parametrize("task", ["speech", *slow("language", "recall", "diffusion")])
def test_the_stored_rows_are_those_that_are_counted(task):
    assert list_networks(task) == list(LISTINGS[task][1]())


@pytest.mark.slow
def test_all_stored_rows_are_those_that_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("evidence.counts.NETWORKS", tmp_path / "networks.json")
    store_networks()
    assert json.loads((tmp_path / "networks.json").read_text()) == json.loads(NETWORKS.read_text())


def test_a_task_for_any_network_says_so(capsys):
    assert main(["models", "--task", "alignment"]) == 0
    assert "The network is `linearized`" in capsys.readouterr().out

import timm
import torch

import linvit  # noqa: F401
from linvit.studies.networks import look, rank_comparison, score_comparison, summarize

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def small(mechanism):
    torch.manual_seed(0)
    return timm.create_model(f"deit_tiny_{mechanism}", **SMALL).eval()


def test_softmax_has_no_state_and_no_negative_scores():
    found = summarize(look(small("softmax"), torch.randn(3, 3, 32, 32)))
    assert "state_rank" not in found
    assert found["negative_share"] == 0
    assert found["output_rank"] == found["mixed_rank"] <= 8


def test_output_of_rala_is_what_the_modulation_leaves():
    images = torch.randn(3, 3, 32, 32)
    looked = look(small("rala"), images)
    ranks = {one.condition["matrix"]: one.mean("effective").item() for one in looked.ranks}
    assert ranks["output"] == ranks["modulated"] != ranks["mixed"]
    assert 0 < summarize(looked)["state_rank"] <= 8


def test_figures_have_a_panel_a_quantity():
    networks = {name: look(small(name), torch.randn(2, 3, 32, 32)) for name in ("softmax", "mala")}
    assert len(rank_comparison(networks).axes) == 5
    assert len(score_comparison(networks).axes) == 4

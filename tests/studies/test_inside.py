import timm
import torch

import linvit  # noqa: F401
from evidence.inside import summarize
from linvit.studies.inside import look_inside, rank_figure, score_figure

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def small(mechanism):
    torch.manual_seed(0)
    return timm.create_model(f"deit_tiny_{mechanism}", **SMALL).eval()


def test_softmax_has_no_state_and_no_negative_scores():
    means = summarize(look_inside(small("softmax"), torch.randn(3, 3, 32, 32)))
    assert "state_rank" not in means
    assert means["negative_share"] == 0
    assert means["output_rank"] == means["mixed_rank"] <= 8


def test_output_of_rala_is_what_the_modulation_leaves():
    images = torch.randn(3, 3, 32, 32)
    inside = look_inside(small("rala"), images)
    ranks = {measured.condition["matrix"]: measured.mean("effective").item() for measured in inside.ranks}
    assert ranks["output"] == ranks["modulated"] != ranks["mixed"]
    assert 0 < summarize(inside)["state_rank"] <= 8


def test_figures_have_a_panel_per_quantity():
    networks = {name: look_inside(small(name), torch.randn(2, 3, 32, 32)) for name in ("softmax", "mala")}
    assert len(rank_figure(networks).axes) == 5
    assert len(score_figure(networks).axes) == 4

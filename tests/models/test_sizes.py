"""Parameters and MACs at 224 px are those measured on the authors' own networks, or counted from their code."""

import pytest
import timm
from tiers import quick

from linvit.analysis.cost import count_cost

# Parameters in millions and G of MACs in all; those of NaLaFormer are counted from the settings in the released code.
SIZES = {
    "hvittt_tiny": ("28.70", "4.903"),
    "hvittt_small": ("54.36", "8.732"),
    "hvittt_base": ("94.37", "16.68"),
    "vit_ttt_tiny": ("6.149", "1.219"),
    "vit_ttt_small": ("23.80", "4.807"),
    "vit_ttt_base": ("90.06", "17.94"),
    "nalaformer_xtiny": ("6.142248", "0.65"),
    "nalaformer_tiny": ("15.907752", "2.86"),
    "nalaformer_small": ("25.654184", "5.04"),
    "nalaformer_base": ("52.002952", "11.74"),
    "nalaformer_large": ("95.426760", "17.68"),
    "deit_tiny_softmax": ("5.717", "1.254"),
    "swin_tiny_softmax": ("28.288", "4.491"),
    "swin_small_softmax": ("49.606", "8.741"),
    "swin_tiny_focused": ("29.192", "4.483"),
    "swin_small_focused": ("50.510", "8.734"),
    "deit_tiny_inline": ("6.478", "1.109"),
    "swin_tiny_inline": ("29.224", "4.459"),
    "swin_small_inline": ("49.793", "8.719"),
    "swin_tiny_agent": ("28.903", "4.499"),
}
QUICK = ("vit_ttt_tiny", "deit_tiny_softmax", "deit_tiny_inline", "swin_tiny_agent")


def rounded(amount, like):
    return f"{amount:.{len(like.partition('.')[2])}f}"


def left_out(name, model):
    """The MACs that the authors' counters leave out, or that their networks have no need of."""
    if name == "swin_tiny_agent":  # the mass of every row, tokens × heads × agents in a block
        return 2 * 3136 * 3 * 9 + 2 * 784 * 6 * 16 + 6 * 196 * 12 * 49
    stages = {"hvittt": [stage.blocks for stage in getattr(model, "stages", ())], "vit": [getattr(model, "blocks", ())]}
    side = 56 if name.startswith("hvittt") else 14  # products of the inner step's kernel, 9 × tokens × head width
    return sum(
        9 * (side // 2**i) ** 2 * block.attn.operator.head_width
        for i, blocks in enumerate(stages.get(name.partition("_")[0], ()))
        for block in blocks
    )


@pytest.mark.parametrize("name", quick(SIZES, QUICK))
def test_sizes_are_those_of_the_authors(name):
    model = timm.create_model(name, device="meta")
    cost, (parameters, macs) = count_cost(model, (3, 224, 224)), SIZES[name]
    assert rounded(cost.parameters / 1e6, parameters) == parameters
    assert rounded((cost.macs + cost.macs_attention - left_out(name, model)) / 1e9, macs) == macs


def test_every_size_of_a_family_is_registered():
    families = ("hvittt", "vit_ttt", "nalaformer")
    listed = timm.list_models([f"{family}_*" for family in families])
    assert set(listed) == {name for name in SIZES if name.startswith(families)}


@pytest.mark.slow
def test_the_printed_size_of_nalaformers_tiny_has_a_narrower_feed_forward():
    cost = count_cost(timm.create_model("nalaformer_tiny", ffn_ratio=3.5, device="meta"), (3, 224, 224))
    assert (round(cost.parameters / 1e6), f"{(cost.macs + cost.macs_attention) / 1e9:.1f}") == (15, "2.7")

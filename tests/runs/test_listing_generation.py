import pytest

from linvit.bundled import list_networks


def test_dit_small_has_the_macs_that_its_paper_prints():
    rows = {(row["variant"], row["mechanism"]): row for row in list_networks("diffusion")}

    def every(variant, mechanism):
        row = rows[variant, mechanism]
        return (row["macs"] + row["macs_attention"]) / 1e9

    assert every("DiT-S/2", "softmax") == pytest.approx(6.06, abs=0.005)
    tokens, width, head_width, layers = 256, 384, 64, 12
    matrices = 2 * tokens**2 * width * layers / 1e9  # scores, and scores times values
    assert every("DiT-S/2", "softmax") - rows["DiT-S/2", "softmax"]["macs"] / 1e9 == pytest.approx(matrices)
    states = 2 * tokens * width * head_width * layers / 1e9
    assert every("DiT-S/2", "linear") - every("DiT-S/2", "softmax") == pytest.approx(states - matrices, abs=2e-3)
    assert len({rows["DiT-S/2", mechanism]["parameters"] for mechanism in ("softmax", "linear", "mala", "rala")}) == 1

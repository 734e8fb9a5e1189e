import json

import pytest
import timm

from linvit.bundled import list_networks
from linvit.runs.listing import compare_recipes, recipe_files
from linvit_cli import main


@pytest.fixture
def recipes(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "shared.yaml").write_text("data: {name: digits, size: 32}\n")
    header = "# published: 99.5 % top-1     ours: not run yet\n"
    (tmp_path / "nano.yaml").write_text(f"{header}base: shared.yaml\nmodel: {{name: ravlt_nano}}\n")
    (tmp_path / "deeper" / "no_cpe.yaml").write_text("base: ../nano.yaml\nmodel: {cpe: false}\n")
    return tmp_path


def test_folders_are_searched_and_what_names_no_model_is_left_out(recipes):
    assert recipe_files([recipes]) == [recipes / "deeper" / "no_cpe.yaml", recipes / "nano.yaml"]
    assert recipe_files([recipes / "nano.yaml", recipes / "deeper"]) == [
        recipes / "nano.yaml",
        recipes / "deeper" / "no_cpe.yaml",
    ]
    with pytest.raises(ValueError, match=r"No recipe in .*shared.yaml names a model"):
        recipe_files([recipes / "shared.yaml"])


def test_recipes_are_counted_against_their_bases(recipes):
    without, nano = compare_recipes([recipes])
    cpe = 10 * (32 + 48 + 2 * 64 + 96)
    assert nano["parameters"] == sum(p.numel() for p in timm.create_model("ravlt_nano", device="meta").parameters())
    assert (nano["base"], nano["more_parameters"], nano["more_macs"]) == (None, None, None)
    assert (without["base"], without["more_parameters"]) == (str(recipes / "nano.yaml"), -cpe)
    assert without["more_macs"] == -9 * (32 * 8 * 8 + 48 * 4 * 4 + 2 * 64 * 2 * 2 + 96)  # maps of a 32 px image
    assert (nano["published"], without["published"]) == ("99.5 % top-1", None)


def test_command_prints_markdown_or_json(recipes, capsys):
    assert main(["models", "--recipes", str(recipes)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.count("|") for line in lines] == [8] * 4
    assert "99.5 % top-1" in lines[3]
    assert main(["models", "--recipes", str(recipes), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows] == [str(recipes / "deeper" / "no_cpe.yaml"), str(recipes / "nano.yaml")]


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

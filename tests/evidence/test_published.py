"""The file of published numbers is complete, and networks and pages show its numbers."""

import math
import re
from pathlib import Path

import pytest

from evidence.claims import cited
from evidence.dense_cost import TABLES, dense_row
from evidence.published import PUBLISHED, ROWS, SIZE, TOP1
from linvit.bundled import header, list_networks

ROOT = Path(__file__).parents[2]
UNPUBLISHED = re.compile(r"(ravlt|mavit|care)_(nano|.*_linear)|(deit|swin)_.*_(mlla|polaformer|rala_mala|mhla)")
UNPUBLISHED_SINCE = re.compile(r"(deit|swin)_.*_(polaformer_pp|nala|recnext|vittt)")  # published in other networks
# no paper puts these mechanisms into Swin, or into Swin-S
NOT_IN_SWIN = re.compile(r"swin_(tiny|small)_linear|swin_small_(hydra|efficient|linear_angular|enhanced)")
FAMILIES = {"RALA, Table 3, RAVLT": "ravlt", "MALA, Table 2, MAViT": "mavit"}
SIZES = {"T": "tiny", "S": "small", "B": "base", "L": "large"}
OURS = {f"{family}_{size}": f"{row}-{mark}" for row, family in FAMILIES.items() for mark, size in SIZES.items()}
OURS |= {f"care_s{size}": f"CARE, Table 1, CARE-S{size}" for size in range(3)}
SPEECH = {"softmax (Conformer S)": "Conformer (S)", "vanilla linear": "Linear Attn", "MALA": "MALA"}
WER = "WER test-clean", "WER test-other", "WER test-clean with LM", "WER test-other with LM"
BENCHMARKED = {
    "`ravlt_tiny`": "ravlt_tiny",
    "`mavit_tiny`": "mavit_tiny",
    "`care_s0`": "care_s0",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "DeiT-S": "deit_small_patch16_224",
    "ConvNeXt-T": "convnext_tiny",
    "EfficientViT-B1": "efficientvit_b1",
    "FastViT-T8 (trained at 256 px)": "fastvit_t8",
    "MobileNetV4-M (trained at 256 px)": "mobilenetv4_conv_medium",
}


def rows_of(page, columns):
    """Cells of every table row of a page with this many columns."""
    lines = (ROOT / page).read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if len(row) == columns]


def row_of(page, columns, first):
    (row,) = [row for row in rows_of(page, columns) if row[0] == first]
    return row


def test_every_cell_is_a_number_with_a_known_unit():
    assert len(ROWS) > 150
    for row in ROWS.values():
        assert row.values
        assert set(row.units.values()) <= {"%", "M", "G", "ms", "s", "images/s", ""}
        for value in row.values.values():
            assert value == "NaN" or math.isfinite(float(value))


def test_every_registered_network_has_its_row_or_no_paper_has_one():
    for row in list_networks():
        unpublished = any(names.fullmatch(row["name"]) for names in (UNPUBLISHED, UNPUBLISHED_SINCE, NOT_IN_SWIN))
        assert (row["name"] in PUBLISHED) != bool(unpublished), row["name"]


def test_the_listed_networks_have_the_published_values():
    for row in [*list_networks(), *list_networks("multilabel")]:
        published = PUBLISHED.get(row["name"])
        values = (published.parameters, published.macs, published.top1) if published else (None, None, None)
        assert (row["published_parameters"], row["published_macs"], row["published_top1"]) == values
    for row in [*list_networks("detection"), *list_networks("segmentation")]:
        published = dense_row(row["framework"], row["backbone"])
        values = (published.values.get(SIZE), published.values.get("FLOPs")) if published else (None, None)
        assert (row["published_parameters"], row["published_macs"]) == values


def test_our_networks_take_their_accuracy_from_their_papers():
    for name, citation in OURS.items():
        assert str(PUBLISHED[name].top1) == ROWS[citation].values[TOP1]
        assert PUBLISHED[name].source == ROWS[citation].table


def test_a_second_source_is_named_with_its_number():
    assert PUBLISHED["deit_tiny_linear"].source == "FLatten, Table 4; 69.8 in MALA, Table 1"


def test_tables_are_cited_with_their_numbers():
    assert cited(["MALA, Table 11", "w/o β", "w/o γ"], ["a figure"]) == (
        "MALA, Table 11 (w/o β 52.3 %, w/o γ NaN); a figure"
    )
    assert cited(["RALA, Table 9", "w/o CPE"], quantity="mIoU") == "RALA, Table 9 (w/o CPE 47.6 %)"
    with pytest.raises(KeyError, match="RALA, Table 9, w/o nothing"):
        cited(["RALA, Table 9", "w/o nothing"])


@pytest.mark.parametrize("framework", TABLES)
def test_both_papers_print_the_same_size_of_a_framework(framework):
    for size in SIZES.values():
        ravlt, mavit = (dense_row(framework, f"{family}_{size}") for family in ("ravlt", "mavit"))
        assert (ravlt is None) == (mavit is None)
        if ravlt and mavit:
            both = {SIZE, "FLOPs"} & mavit.values.keys()
            assert [ravlt.values[key] for key in both] == [mavit.values[key] for key in both]


@pytest.mark.parametrize("name", ["s0_no_interaction1", "s0_no_interaction2", "s0_no_memory"])
def test_care_s_ablations_have_the_published_size(name):
    file = ROOT / "recipes" / "care" / "ablations" / f"{name}.yaml"
    row = ROWS[header(file)["published"].partition("(")[2].removesuffix(")")]
    parameters, macs = re.search(r"# size: ([\d,]+) parameters, ([\d.]+) G", file.read_text()).groups()
    millions = int(parameters.replace(",", "")) / 1e6
    assert (f"{millions:.1f}", f"{float(macs):.1f}") == (row.values[SIZE], row.values["MACs"])


@pytest.mark.parametrize("name", OURS)
def test_sizes_and_accuracies_of_the_pages(name):
    published = PUBLISHED[name]
    assert row_of("README.md", 7, f"`{name}`")[5] == f"{published.top1} %"
    (sizes,) = [
        row for row in rows_of("docs/evidence/results.md", 6) if row[0] == f"`{name}`" and row[1].endswith("M)")
    ]
    assert sizes[1].endswith(f" ({published.parameters} M)")
    assert sizes[2].endswith(f" ({published.macs})")
    assert sizes[5] == str(published.top1)


@pytest.mark.parametrize("model", ["Transformer", "RetNet", "GLA", "Mamba", "MALA"])
def test_language_page(model):
    assert row_of("docs/use/language.md", 6, model)[1:5] == list(ROWS[f"MALA, Table 6, {model}"].values.values())


@pytest.mark.parametrize("attention", SPEECH)
def test_speech_page(attention):
    values = ROWS[f"MALA, Table 7, {SPEECH[attention]}"].values
    clean, other, clean_with, other_with = (values[measure] for measure in WER)
    cells = row_of("docs/use/speech.md", 4, attention)
    assert cells[1:3] == [f"{clean} / {other}", f"{clean_with} / {other_with}"]
    sizes = [row[5] for row in rows_of("docs/use/speech.md", 6) if row[0] == "`conformer_small`"]
    assert [size.partition(" (")[0] for size in sizes] == [f"{values[SIZE]} M"] * 2


def test_generation_page():
    dit, mala = (ROWS[f"MALA, Table 8, {row}"].with_unit("FLOPs") for row in ("DiT-S/2", "MALA"))
    assert f"The paper states {dit} for DiT-S/2 and {mala} for its own network." in (
        (ROOT / "docs" / "use" / "generation.md").read_text()
    )


def test_dense_page():
    sizes = [row[1:6] for row in rows_of("docs/use/dense.md", 7) if row[0] == "paper"]
    rows = [[dense_row(framework, f"ravlt_{size}") for framework in TABLES] for size in SIZES.values()]
    assert sizes == [[f"{row.values[SIZE]} / {row.values['FLOPs']}" if row else "–" for row in line] for line in rows]


@pytest.mark.parametrize("network", BENCHMARKED)
def test_benchmarks_page(network):
    assert row_of("docs/evidence/benchmarks.md", 5, network)[4] == str(PUBLISHED[BENCHMARKED[network]].top1)


def test_deployment_page():
    phones = [citation for citation in ROWS if "repository, iPhone" in citation]
    shown = [
        (f"{source}, repository, {phone}, {network}", top1, latency)
        for network, top1, latency, phone, source in rows_of("docs/evidence/deployment.md", 5)[2:]
    ]
    assert [citation for citation, *_ in shown] == phones
    for citation, top1, latency in shown:
        assert ROWS[citation].values == {"latency": latency, "top-1": top1}

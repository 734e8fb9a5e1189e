"""Every picture is drawn from made-up rows."""

from linvit.bench.page import figures
from linvit.bench.rows import Report, Row
from linvit.layers.mechanisms import MECHANISMS


def made_up(names, **measured):
    return [
        Row(name, variant, "float32", 1, 1, tokens=tokens, clock="cpu", median_ms=float(tokens), **measured)
        for name in names
        for variant in ("plain", "fused")
        for tokens in (49, 196)
    ]


def test_time_and_memory_over_tokens():
    skipped = Row("rala", "triton", "float32", 1, 1, tokens=3, skipped="no GPU")
    ((name, figure),) = figures(Report("op", rows=[*made_up(("ravlt_tiny", "convnext_tiny"), peak_mib=9.0), skipped]))
    assert name == "growth"
    time, memory = figure.axes
    assert len(time.lines) == len(memory.lines) == 4
    assert "memory" in memory.get_ylabel()


def test_a_mechanism_has_its_colour_and_a_dashed_line_looks_dashed():
    ((_, figure),) = figures(Report("op", rows=made_up(("net", "mala", "softmax"))))
    (axes,) = figure.axes
    colours = {line.get_label().split()[0]: line.get_color() for line in axes.lines}
    assert colours["mala"] == MECHANISMS["mala"].colour
    assert colours["softmax"] == MECHANISMS["softmax"].colour
    assert len(set(colours.values())) == 3
    (legend,) = figure.legends
    dashed = [handle for handle in legend.get_lines() if handle.get_linestyle() == "--"]
    assert len(dashed) == 3
    assert all(handle.get_xdata()[-1] >= 4 * 10 for handle in dashed)
    assert all(text.get_fontsize() >= 10 for text in legend.get_texts())

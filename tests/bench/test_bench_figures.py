"""Every picture is drawn from made-up rows."""

from linvit.bench.page import figures
from linvit.bench.rows import Report, Row
from linvit.layers.mechanisms import MECHANISMS


def made_up(kind):
    rows = []
    for index, (name, pattern) in enumerate((("ravlt_tiny", "LLSS"), ("convnext_tiny", None))):
        for variant in ("plain", "fused"):
            for side in (224, 448):
                options = {"tokens": side * side} if kind == "op" else {"size": (side, side), "pattern": pattern}
                ms = (1 + index) * side**2 / 1000
                row = Row(name, variant, "float32", 1, 1, clock="cpu", median_ms=ms, peak_mib=side, **options)
                rows.append(row)
    return Report(kind, rows=[*rows, Row("rala", "triton", "float32", 1, 1, tokens=3, skipped="no GPU")])


def test_time_and_memory_over_tokens():
    ((name, figure),) = figures(made_up("op"))
    assert name == "growth"
    time, memory = figure.axes
    assert len(time.lines) == len(memory.lines) == 4
    assert "memory" in memory.get_ylabel()


def test_a_mechanism_has_its_colour_and_a_dashed_line_looks_dashed():
    rows = [
        Row(name, variant, "float32", 1, 1, tokens=tokens, clock="cpu", median_ms=float(tokens))
        for name in ("net", "mala", "softmax")
        for variant in ("plain", "fused")
        for tokens in (49, 196)
    ]
    ((_, figure),) = figures(Report("op", rows=rows))
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

from matplotlib.figure import Figure

from linvit.analysis.figures import svg, write_figure


def figure():
    made = Figure(figsize=(2, 2), layout="constrained")
    made.subplots().plot([1, 2])
    return made


def test_a_figure_becomes_the_text_of_an_image():
    assert svg(figure()).rstrip().endswith("</svg>")


def test_a_figure_is_written_in_both_formats_and_nothing_else_is_left(tmp_path):
    write_figure(figure(), tmp_path / "growth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth.png", "growth.svg"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")

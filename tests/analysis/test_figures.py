import warnings
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from linvit.analysis.figures import (
    COLOURS,
    colour_of,
    colours_of,
    integer_ticks,
    literal,
    panel_grid,
    svg,
    write_figure,
)
from linvit.layers.mechanisms import MECHANISMS


def figure():
    made = Figure(figsize=(2, 2), layout="constrained")
    made.subplots().plot([1, 2])
    return made


def texts(image):
    return [element.text for element in ElementTree.fromstring(image).iter("{http://www.w3.org/2000/svg}text")]


def test_a_figure_becomes_the_text_of_an_image_and_its_words_stay_words():
    made = figure()
    made.axes[0].set_title("a title")
    assert "a title" in texts(svg(made))
    assert svg(figure()) == svg(figure()), "no date, no random names"


def test_a_figure_is_written_in_three_formats_and_nothing_else_is_left(tmp_path):
    write_figure(figure(), tmp_path / "growth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth.pdf", "growth.png", "growth.svg"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    document = (tmp_path / "growth.pdf").read_bytes()
    assert document.startswith(b"%PDF")
    assert b"/Type3" not in document, "journals want outlines of fonts"
    write_figure(figure(), tmp_path / "growth")
    assert (tmp_path / "growth.pdf").read_bytes() == document


def test_every_mechanism_has_a_colour_of_its_own():
    assert len({mechanism.colour for mechanism in MECHANISMS.values()}) == len(MECHANISMS)


@pytest.mark.parametrize("form", ["{}", "stdlib_bytes_{}", "{}_nano_digits", "deit_tiny_{}"])
def test_a_mechanism_has_one_colour_in_every_name(form):
    for name, mechanism in MECHANISMS.items():
        assert colour_of(form.format(name)) == mechanism.colour


def test_the_first_mechanism_in_a_name_counts():
    assert colour_of("rala_softmax") == colour_of("rala") != colour_of("rala_mala")
    assert colour_of("softmax_unit_query") != colour_of("softmax") == colour_of("softmax_gated")
    assert colour_of("ravlt_nano") == "black"


def test_different_names_have_different_colours():
    names = ["mala", "mala_exp", "other", "softmax", "mala"]
    colours = colours_of(names)
    assert (colours["mala"], colours["softmax"]) == (MECHANISMS["mala"].colour, MECHANISMS["softmax"].colour)
    assert len(set(colours.values())) == len(colours) == 4
    assert len(colours_of([str(number) for number in range(9)])) == 9 > len(COLOURS)


# what formulas, XML and terminals read otherwise, beside letters of any script
@given(st.text(alphabet=st.one_of(st.sampled_from("$\\{}^_<&\x1b\n\udcff\u202e"), st.characters()), max_size=12))
@settings(derandomize=True, deadline=None, database=None, max_examples=40)
def test_text_of_users_is_shown_letter_by_letter(name):
    made = Figure(figsize=(2, 2))
    made.text(0, 0, literal(f"x{name}x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (shown,) = texts(svg(made))
    assert shown.isprintable()
    assert shown == f"x{name}x" or not name.isprintable()


@pytest.mark.parametrize("last", [1, 2, 3, 7, 40, 1000])
def test_epochs_have_whole_numbers_however_few_there_are(last):
    axes = figure().axes[0]
    integer_ticks(axes.xaxis)
    axes.set_xlim(0.5, last + 0.5)
    ticks = [tick for tick in axes.get_xticks() if 0.5 <= tick <= last + 0.5]
    assert ticks
    assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("count", "shape"), [(0, (1, 1)), (1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))]
)
def test_panels_are_spread_over_rows(count, shape):
    made, panels = panel_grid(count, 3, 2.0)
    assert len(panels) == len(made.axes) == count
    assert made.get_figheight() == 2 * shape[0]
    assert all(panel.get_gridspec().get_geometry() == shape for panel in panels)

import pytest

from linvit import bundled
from linvit.bundled import bundled_files, files_below, find_recipe, recipes, shown_name
from linvit.runs.listing import compare_recipes
from linvit.runs.recipe_values import read_recipe

DIGITS = "demo/ravlt_nano_digits"


def test_a_name_is_found_from_every_folder_and_a_file_of_that_name_goes_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(DIGITS) == bundled_files()[DIGITS]
    assert read_recipe(DIGITS)["folder"] == "runs/ravlt_nano_digits"
    (tmp_path / "demo").mkdir()
    (tmp_path / DIGITS).write_text("seed: 5\n")
    assert read_recipe(DIGITS)["seed"] == 5


@pytest.mark.parametrize(
    "name", ["demo/ravlt_nano_digit", f"recipes/{DIGITS}.yml", "ravlt_nano_digits", f"{DIGITS}.yaml", f"../{DIGITS}"]
)
def test_an_unknown_name_offers_the_nearest(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"no recipe at {name}: give .*Did you mean '{DIGITS}'\?"):
        find_recipe(name)


def test_a_wheel_keeps_them_inside_the_package(tmp_path, monkeypatch):
    file = tmp_path / "linvit" / "recipes" / "demo" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("seed: 3\n")
    monkeypatch.setattr(bundled, "PACKAGE", tmp_path / "linvit")
    assert bundled_files() == {"demo/mine": file}
    assert read_recipe("demo/mine")["seed"] == 3


def test_every_word_must_stand_in_name_or_header():
    rows = recipes("DEMO", "softmax")
    assert [row["name"] for row in rows] == ["demo/softmax_nano_digits"]
    assert len(recipes()) == len(bundled_files())
    with pytest.raises(ValueError, match=r"No recipe contains 'ravlt' and 'imageneet' .*Did you mean 'imagenet'\?"):
        recipes("ravlt", "imageneet")


def test_every_header_says_everything():
    for row in recipes():
        assert all(row.values()), row["name"]
        assert f"linvit train {row['name']}" in row["command"]


def test_folders_and_rows_go_by_name_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [shown_name(file) for file in files_below("demo")][-1] == "demo/softmax_nano_digits"
    (row,) = compare_recipes([DIGITS])
    assert (row["recipe"], row["published"]) == (DIGITS, "nothing (the split is ours)")

"""The documentation site: what is generated for it is complete, and it builds strictly, without other sites."""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import yaml

from evidence import reproduce, understand
from evidence.__main__ import arguments
from evidence.published import PUBLISHED
from linvit.bench import kinds
from linvit.bundled import bundled_files, list_networks
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit_cli import _parser, parse
from linvit_cli.run_arguments import recipe_overrides

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "hooks"))
public = pytest.importorskip("public")
network_card = pytest.importorskip("model_cards").network_card


@pytest.fixture(scope="module")
def pages():
    return public.generated_pages()


def test_every_public_name_is_documented_and_in_the_reference(pages):
    assert public.undocumented() == []
    text = "\n".join(page for name, page in pages.items() if name.startswith("reference/python/"))
    written = {name.removesuffix(".__init__") for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    for name in (
        *public.offered("linvit"),
        *public.offered("linvit.ops"),
        *public.mentioned(public.written_pages()),
    ):
        assert name in written or public.home_of(name) in {public.home_of(other) for other in written}, name


def test_a_public_name_without_docstring_ends_the_build(monkeypatch):
    monkeypatch.setattr("linvit.ops.merge.__doc__", None)
    with pytest.raises(ValueError, match=r"no docstring: linvit\.ops\.merge"):
        public.python_pages()


def leaves(parser):
    inner = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for choices in inner for child in choices.values() for leaf in leaves(child)] or [parser]


def test_every_command_with_every_option_is_on_the_page(pages):
    sections = re.split(r"^#{3,4} ", pages["reference/commands.md"], flags=re.MULTILINE)
    assert len(leaves(_parser())) > 20
    for parser in leaves(_parser()):
        (section,) = [text for text in sections if text.startswith(f"{parser.prog} {{")]
        for action in parser._actions:
            for option in set(action.option_strings) - {"-h", "--help", "--debug", "--keep-memory"}:
                assert f"`{option}" in section or f", {option}" in section, (parser.prog, option)
        assert all(line.strip() in section for line in (parser.epilog or "").splitlines()[1:])


def test_every_recipe_is_listed(pages):
    assert set(re.findall(r"^\| `([^`]+)` \|", pages["reference/recipes.md"], re.MULTILINE)) == set(bundled_files())


def test_every_network_has_a_card(pages):
    for row in list_networks():
        card = pages[f"reference/models/{row['name']}.md"]
        _, matter, text = card.split("---\n", 2)
        matter = yaml.safe_load(matter)
        assert (matter["library_name"], matter["tags"][:2]) == ("timm", ["image-classification", "timm"])
        assert f"{row['parameters']:,}" in text
        if row["name"] in PUBLISHED:
            assert f"top-1 {PUBLISHED[row['name']].top1} %" in text
            assert PUBLISHED[row["name"]].source.partition(";")[0] in text
        assert f"[`{row['name']}`]({row['name']}.md)" in pages["reference/models/index.md"]


def test_a_card_says_whose_weights_there_are():
    released, bundled, none = (network_card(name) for name in ("care_s0", "mavit_nano", "deit_tiny_mala"))
    assert "license: unknown\n" in released
    assert "`linvit.load_released` reads" in released
    assert "pretrained=True" not in released
    assert '"mavit_nano.cifar10", pretrained=True' in bundled
    assert "No weights are published" in none
    with pytest.raises(ValueError, match="'resnet18' is not a network of linvit"):
        network_card("resnet18")


def test_the_code_of_a_card_runs():
    (code,) = re.findall(r"```python\n(.*?)```", network_card("care_nano").partition("## Weights")[0], re.DOTALL)
    names = {}
    exec(code, names)
    assert names["model"].num_classes == 10
    assert timm.is_model("care_nano")


def test_cards_cite_the_papers():
    keys = {"ravlt_tiny": "rala", "mavit_tiny": "mala", "care_s0": "care", "deit_tiny_rala": "rala"}
    for name, key in keys.items():
        assert re.findall(r"@inproceedings{\w+2025(\w+),", network_card(name)) == [key]
    assert network_card("deit_tiny_rala_mala").count("@inproceedings") == 2
    assert network_card("deit_tiny_hydra").count("@inproceedings") == 3


def templates():
    """Every text in the code, with … for what is filled in."""
    for file in (*(ROOT / "linvit").rglob("*.py"), *(ROOT / "linvit_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_errors_that_are_explained_are_those_of_the_code():
    sentences = re.findall(r"```text\n(.*?)\n```", (DOCS / "reference" / "errors.md").read_text(), re.DOTALL)
    known = "\n".join(templates())
    assert len(sentences) >= 18
    for sentence in sentences[2:]:  # the first two are those of timm and transformers
        for words in re.split(r"`?…`?", sentence):
            assert words.strip(" '`") in known, words


def test_every_page_is_in_the_navigation(pages):
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(navigation)))
    written = {
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if not path.with_suffix(".safetensors").exists()
    }
    cards = {name for name in pages if re.match(r"reference/models/(?!index)", name)}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert listed == written | set(pages) - cards | notebooks


@pytest.fixture(scope="module")
def reproduced():
    """Paper → [item, what it shows, command, state] of each table, figure and section; as the page has them."""
    page, tables = reproduce.PAGE.read_text(), {}
    for name, text in reproduce.sections().items():
        begin, end = reproduce.marks(name)
        assert f"{begin}\n\n{text}\n{end}" in page, "run `make reproduce`"
        tables[name] = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)[2:]]
    return {paper: tables[paper] for paper in reproduce.ITEMS}


def test_every_table_and_figure_can_be_reproduced_or_is_explained(reproduced):
    for paper, figures, tables in (("RALA", 9, 10), ("MALA", 7, 11), ("CARE", 3, 5)):
        rows = reproduced[paper]
        assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
        names = re.sub(r"Figures (\d) and (\d)", r"Figure \1 Figure \2", "; ".join(name for name, *_ in rows))
        wanted = {*(f"Figure {n}" for n in range(1, figures + 1)), *(f"Table {n}" for n in range(1, tables + 1))}
        assert wanted == set(re.findall(r"(?:Figure|Table) \d+", names))
        assert all(
            "`linvit" in how or "evidence bench" in how or "](" in how or "header" in how for _, _, how, _ in rows
        )


def test_commands_of_the_page_on_reproduction_are_understood(reproduced):
    cells = [row[2] for rows in reproduced.values() for row in rows]
    commands = [command for cell in cells for command in re.findall("`(?:linvit|python -m evidence) (.*?)`", cell)]
    assert len(commands) > 40
    ours = re.findall("`python -m evidence (.*?)`", " ".join(cells))
    for command in commands:
        options = arguments().parse_args(command.split()) if command in ours else parse(command.split())
        if options.command == "train":
            Recipe(read_recipe(bundled_files()[options.recipe], recipe_overrides(options.rest)))
        if options.command == "bench":
            kinds.options_of(options.kind, {**vars(options), "device": "cpu"})


def test_the_figures_are_those_that_the_code_draws():
    assert {path.stem for path in (DOCS / "understand").glob("*.svg")} == {*understand.FIGURES, "formula"}
    for name, draw in understand.FIGURES.items():
        committed = (DOCS / "understand" / f"{name}.svg").read_text()
        for axes in draw().axes:
            for text in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()):
                assert text.replace("&", "&amp;") in committed, name


def build(folder, *options):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_broken_link_ends_the_build(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[one](missing.md) and [other](index.md#nothing)\n")
    settings = {
        "docs_dir": "docs",
        "hooks": [],
        "plugins": [],
        "extra_css": [],
        "nav": None,
        "not_in_nav": "",
        "watch": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.dump({"INHERIT": str(ROOT / "mkdocs.yml"), **settings}))
    done = build(tmp_path / "site", "--config-file", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "missing.md" in done.stderr
    assert "#nothing" in done.stderr
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[link](#page)\n")
    assert build(tmp_path / "site", "--config-file", tmp_path / "mkdocs.yml").returncode == 0


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    html = list((tmp_path / "site").rglob("*.html"))
    assert len(html) > 120
    for page in html:
        text = page.read_text()
        assert not re.search(r'<(script|img|iframe)[^>]+src="?(https?:)?//', text), page
        assert not re.search(r'<link[^>]+rel="?(stylesheet|preconnect|icon)[^>]+href="?(https?:)?//', text), page
    index = (tmp_path / "site" / "search" / "search_index.json").read_text()
    assert "linear_attention" in index
    assert not list((tmp_path / "site").rglob("*.jsonl"))

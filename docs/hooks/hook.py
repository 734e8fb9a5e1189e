"""What mkdocs calls while it builds the site: adds generated pages, notebooks, the explorer, and links to them."""

import posixpath
import re
from pathlib import Path
from typing import Any

import notebook_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from public import FROM_THE_ROOT, ROOT, generated_pages

EXPLORER = ROOT / "build" / "explorer"
EXPLORER_LINK = "<!-- explorer -->"  # becomes a link where it is built
OUTSIDE = re.compile(r"\]\((?:\.\./)+(CONTRIBUTING\.md|CHANGELOG\.md|notebooks/[\w-]+\.ipynb)")

SOUGHT = ("use/your-images.md", "use/own.md", "use/swap.md", "use/speed.md")
"""The pages that newcomers look for under words that stand on every page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    for path, content in notebook_pages.pages():
        files.append(File.generated(config, path, content=content))
    for path in explorer_files():
        inside = f"explorer/{path.relative_to(EXPLORER).as_posix()}"
        files.append(File.generated(config, inside, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files outside docs/, for readers on GitHub, lead to their copies here."""
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "use":  # before the log and the changelog, which name everything
        page.meta.setdefault("search", {"boost": 12 if page.file.src_uri in SOUGHT else 4})

    def copy(match: re.Match[str]) -> str:
        place = FROM_THE_ROOT.get(match[1], match[1].replace(".ipynb", ".md"))
        return f"]({posixpath.relpath(place, folder)}"

    link = f"[Open the explorer]({posixpath.relpath('explorer/index.html', folder)})" if explorer_files() else ""
    return OUTSIDE.sub(copy, markdown).replace(EXPLORER_LINK, link)


def explorer_files() -> list[Path]:
    """The files of the explorer if `make explorer` has built it."""
    return sorted(path for path in EXPLORER.rglob("*") if path.is_file())

"""What mkdocs calls while it builds the site: adds the generated pages, and sends links to them."""

import posixpath
import re
from typing import Any

import generated
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TO_THE_ROOT = re.compile(r"\]\((?:\.\./)+(CONTRIBUTING\.md|CHANGELOG\.md)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files in the root of the repository, for readers on GitHub, lead to their copies here."""
    folder = posixpath.dirname(page.file.src_uri)

    def copy(match: re.Match[str]) -> str:
        return f"]({posixpath.relpath(generated.FROM_THE_ROOT[match[1]], folder)}"

    return TO_THE_ROOT.sub(copy, markdown)

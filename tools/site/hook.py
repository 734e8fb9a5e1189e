"""The pages of the site that are not written by hand, added while mkdocs builds."""

import re
from pathlib import Path

import commands
import model_pages
import python_pages
import recipe_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {"CONTRIBUTING.md": "contribute/index.md", "CHANGELOG.md": "contribute/changes.md"}
LINK = re.compile(r"\]\(docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and those that are copies of files in the repository's root."""
    pages = {target: LINK.sub("](../", (ROOT / name).read_text("utf-8")) for name, target in FROM_THE_ROOT.items()}
    pages |= {"reference/commands.md": commands.page(), "reference/recipes.md": recipe_pages.page()}
    pages |= {f"reference/python/{name}": text for name, text in python_pages.pages().items()}
    pages |= {f"reference/models/{name}": text for name, text in model_pages.pages().items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files

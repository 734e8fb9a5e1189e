"""The pages of the site that are not written by hand."""

import re
from pathlib import Path

import commands
import model_pages
import python_pages
import recipe_pages
from model_cards import BIBTEX

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {"CONTRIBUTING.md": "contribute/index.md", "CHANGELOG.md": "contribute/changes.md"}
LINK = re.compile(r"\]\(docs/")
CITE = """# Cite

Please cite the paper of the method that you use, and linvit.

## The papers

```bibtex
{papers}```

## linvit

The file `CITATION.cff` of the repository, which reference managers and GitHub read:

```yaml
{software}```
"""


def pages() -> dict[str, str]:
    """Each page as Markdown, by its path in docs.

    Raises ValueError if a public name has no docstring.
    """
    return {
        **{target: LINK.sub("](../", _read(name)) for name, target in FROM_THE_ROOT.items()},
        "start/cite.md": CITE.format(papers=BIBTEX, software=_read("CITATION.cff")),
        "reference/commands.md": commands.page(),
        "reference/recipes.md": recipe_pages.page(),
        **{f"reference/python/{name}": text for name, text in python_pages.pages().items()},
        **{f"reference/models/{name}": text for name, text in model_pages.pages().items()},
    }


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")

"""Runs the page's modules in Node.js."""

import json
import shutil
import subprocess

import numpy as np
import torch

from linvit.explorer.serving import PAGE

NODE = shutil.which("node")


class Node:
    """Calls exported functions of the page's modules; numbers pass as JSON, which keeps every bit of a double."""

    def __init__(self, folder):
        self.folder = shutil.copytree(PAGE, folder / "page")
        (self.folder / "package.json").write_text('{"type": "module"}')

    def __call__(self, program, **given):
        """What the body of a function returns, with `given` and the modules attention, spectrum and timing in scope."""
        names = ("attention", "spectrum", "timing")
        imports = "".join(f'import * as {name} from "./{name}.js";' for name in names)
        read = "const given = JSON.parse(await (await import('node:fs/promises')).readFile('given.json'));"
        text = f"{imports}{read}const f = (given) => {{{program}}};console.log(JSON.stringify(f(given)));"
        (self.folder / "given.json").write_text(json.dumps(given, default=_plain))
        (self.folder / "program.js").write_text(text)
        done = subprocess.run([NODE, "program.js"], cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _plain(value):
    assert isinstance(value, torch.Tensor | np.ndarray)
    return value.tolist()


def head(query, key, value=None):
    """A head as the modules take it, from (tokens, width)."""
    return {
        "query": query.flatten(),
        "key": key.flatten(),
        "value": (key if value is None else value).flatten(),
        "tokens": query.shape[0],
        "width": query.shape[1],
    }

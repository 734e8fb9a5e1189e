"""Serves the built explorer on this machine alone; needs only the standard library."""

import contextlib
import re
import shutil
import threading
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

from linvit.ranges import Range, checked

PACKAGE = Path(__file__).parent
PAGE = PACKAGE / "page"
INSTALLED = PACKAGE / "built"
BUILT = PACKAGE.parents[1] / "build" / "explorer"
HOST = "127.0.0.1"
POLICY = "default-src 'self' blob: 'wasm-unsafe-eval'; frame-ancestors 'none'"  # the page itself allows less
HIGHEST_PORT = 65535


def built_folder() -> Path:
    """The folder of the built explorer: inside an installed package, in `build` of a checkout.

    Raises FileNotFoundError if it has not been built.
    """
    for folder in (INSTALLED, BUILT):
        if (folder / "index.html").is_file():
            return folder
    raise FileNotFoundError(
        "The explorer is not in this installation: install a released wheel, which has it, or run `make explorer` in a"
        " clone of linvit, which needs npm."
    )


class Explorer:
    """The explorer, served from a thread until `close` or the end of Python; a context manager.

    address: where the page is, such as http://127.0.0.1:8000/. opened: whether a browser has been told to open it.
    """

    opened = False

    def __init__(self, folder: Path, port: int) -> None:
        self._server = ThreadingHTTPServer((HOST, port), partial(_Files, directory=str(folder)))
        self.address = f"http://{HOST}:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when the explorer is closed, so that a script does not end before."""
        self._thread.join()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "Explorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explorer({self.address})"


@checked
def explore(*, port: Annotated[int, Range(0, HIGHEST_PORT)] = 0, browser: bool = True) -> Explorer:
    """Serves the page that shows attention on the user's own image, to this machine only, and opens it in the browser.

    Args:
        port: of the address; 0 for any free one.
        browser: whether to open the page. Where there is no browser, open `address` of the result.

    Raises FileNotFoundError if the explorer has not been built, OSError if the port is not free.
    """
    folder = built_folder()
    try:
        explorer = Explorer(folder, port)
    except OSError as error:
        raise OSError(
            f"`port` {port} cannot be used ({error.strerror}): choose another, or 0 for any free one."
        ) from error
    if browser:
        explorer.opened = webbrowser.open(explorer.address)
    return explorer


def write_explorer(folder: str | Path) -> Path:
    """Copies the built page into a new or empty folder, for any web server; returns the folder.

    Raises FileNotFoundError if the explorer has not been built, ValueError if the folder contains anything.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose another one, or delete it.")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(built_folder(), temporary)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


class _Files(SimpleHTTPRequestHandler):
    """The files of a folder, and nothing outside it, not even through links; requests must name this machine."""

    timeout = 60  # seconds without a byte, after which a connection is closed

    extensions_map = {  # noqa: RUF012
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".mjs": "text/javascript; charset=utf-8",
        ".json": "application/json",
        ".svg": "image/svg+xml",
        ".wasm": "application/wasm",
        "": "application/octet-stream",
    }

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a page that is closed or loaded again while it loads
            super().handle()

    def send_head(self) -> Any:
        if re.sub(r":\d+$", "", self.headers.get("Host", "").lower()) not in (HOST, "localhost"):
            self.send_error(421, "Open the address that linvit explore printed")
            return None
        path = Path(self.translate_path(self.path)).resolve()
        if not path.is_relative_to(Path(self.directory).resolve()):
            self.send_error(404)
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def end_headers(self) -> None:
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent: requests are of no interest."""

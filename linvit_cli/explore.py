"""`linvit explore`."""

import argparse
from contextlib import suppress
from pathlib import Path

from linvit.explorer import serving
from linvit_cli.parser import whole
from linvit_cli.streams import show

HELP = "Show in the browser what attention reads in your own image."
EXAMPLES = ("linvit explore", "linvit explore --write site/explorer")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit explore [options]"
    text = "port of the address, which only this machine can open (default: any free one)"
    command.add_argument("--port", type=whole, metavar="N", help=text)
    command.add_argument("--no-browser", action="store_true", help="only print the address")
    text = "copy the page into a new or empty folder, for any web server, and stop (default: no copy)"
    command.add_argument("--write", type=Path, metavar="FOLDER", help=text)


def run(options: argparse.Namespace) -> int:
    if options.write is not None:
        if options.port is not None or options.no_browser:
            raise ValueError("--write only copies the page: leave --port and --no-browser out.")
        show(f"Page: {serving.write_explorer(options.write) / 'index.html'}")
        return 0
    with (
        suppress(KeyboardInterrupt),
        serving.explore(port=options.port or 0, browser=not options.no_browser) as explorer,
    ):
        show(f"Explorer: {explorer.address} (stop with Ctrl+C)")
        if not (explorer.opened or options.no_browser):
            show("No browser could be opened here: open this address in one on this machine.")
        explorer.wait()
    return 0

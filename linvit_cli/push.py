"""`linvit push`."""

import argparse
import sys
from contextlib import suppress

from linvit_cli.run_arguments import call, chosen, data_settings
from linvit_cli.streams import show

HELP = "Publish a run on the Hugging Face hub, with a model card."
EXAMPLES = (
    "linvit push runs/ravlt_nano_digits user/digits --dry-run",
    "linvit push runs/ravlt_nano_digits user/digits --license apache-2.0",
)
TAKES_OVERRIDES = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit push RUN USER/NAME [data.root=FOLDER] [options]"
    command.add_argument("source", metavar="RUN", help="folder of a run of classification, or a checkpoint of it")
    command.add_argument("repository", metavar="USER/NAME", help="name on the hub; created if it does not exist")
    text = "folder for the files (default: hub in the run's folder)"
    command.add_argument("--folder", metavar="FOLDER", help=text)
    text = "only write the folder, without network or account"
    command.add_argument("--dry-run", action="store_true", help=text)
    text = "let everybody read it (default: private)"
    command.add_argument("--public", action="store_true", help=text)
    text = "upload without asking (default: asks on a terminal)"
    command.add_argument("--yes", action="store_true", help=text)
    card = command.add_argument_group("model card")
    card.add_argument("--license", metavar="NAME", help="license of the weights, such as apache-2.0 (default: none)")
    card.add_argument("--note", metavar="TEXT", help="a sentence about the data or limits (default: none)")


def run(options: argparse.Namespace) -> int:
    from linvit.runs.hub import check_access, check_repository, upload
    from linvit.runs.loading import load_run

    card, settings = chosen(options, "license", "note", "folder"), data_settings(options.overrides)
    check_repository(options.repository)
    if not options.dry_run:
        if not options.yes and not sys.stdin.isatty():
            raise ValueError("Nothing is uploaded unasked, and there is no terminal to ask on: add --yes or --dry-run.")
        check_access(options.repository, options.public)
    loaded = load_run(options.source)
    pushed = call(loaded, "push_to_hub", options.repository, settings=settings, dry_run=True, progress=True, **card)
    show(f"In {pushed.folder}:")
    for name, size in pushed.files.items():
        show(f"  {name:20} {size:>13,} bytes")
    target = f"{options.repository} ({'public' if options.public else 'private'})"
    if options.dry_run:
        show(f"Nothing was uploaded. Without --dry-run these files would go to {target}.")
        return 0
    agreed = options.yes
    if not agreed:
        with suppress(EOFError):
            agreed = input(f"Upload these files to {target}? [y/N] ").strip().lower() in ("y", "yes")
    if not agreed:
        show("Nothing was uploaded.")
        return 0
    url = upload(pushed.folder, pushed.files, options.repository, options.public)
    show(f"Uploaded: {url}")
    return 0

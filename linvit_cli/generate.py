"""`linvit generate`."""

import argparse
import inspect
from pathlib import Path

from linvit_cli.run_arguments import add_weights, chosen
from linvit_cli.tables import show_pieces

HELP = "Continue text with a language model, or sample images from an image generator."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit generate RUN [--seed N] [--weights raw|ema] ([--prompt TEXT] [--tokens N] [--temperature T] [--top-p P]"
        " | --output FILE [--classes CLASS ...] [--count N] [--guidance G] [--steps N] [--sampler NAME] [--vae VAE])"
    )
    command.add_argument("path", metavar="RUN", help="a run's folder or a checkpoint of it")
    command.add_argument("--prompt", help="text: how it begins (the start of a document)")
    command.add_argument("--tokens", metavar="N", type=int, help="text: most tokens to generate (256)")
    command.add_argument("--temperature", metavar="T", type=float, help="text: 0 takes the most likely token (1)")
    command.add_argument("--top-p", metavar="P", type=float, help="text: keep the likeliest tokens up to this sum (1)")
    command.add_argument("--output", metavar="FILE", type=Path, help="images: a .png grid, or all of them as .npz")
    command.add_argument("--classes", metavar="CLASS", nargs="+", help="images: names or numbers of classes (all)")
    command.add_argument("--count", metavar="N", type=int, help="images per class (8)")
    command.add_argument("--guidance", metavar="G", type=float, help="classifier-free guidance scale (1 = off)")
    command.add_argument("--steps", metavar="N", type=int, help="images: sampling steps, up to 1,000 (50)")
    command.add_argument("--sampler", choices=("ddim", "ddpm"), help="images: the sampler (ddim)")
    command.add_argument("--vae", dest="autoencoder", help="images: autoencoder of latents, a folder or hub name")
    command.add_argument("--seed", metavar="N", type=int, help="seed of the random numbers (0)")
    add_weights(command)


def run(options: argparse.Namespace) -> int:
    from linvit.runs.run import load_run

    loaded = load_run(options.path)
    if options.output is None and "output" in inspect.signature(loaded.spec.generate).parameters:
        raise ValueError("This run generates images: say where they go with --output FILE.png or FILE.npz.")
    names = ("prompt", "tokens", "temperature", "top_p", "classes", "count", "guidance", "steps", "sampler")
    generated = loaded.generate(
        **chosen(options, *names, "autoencoder", "seed", "weights", "output"),
    )
    if options.output is None:
        show_pieces(generated)
    else:
        print(f"{options.output} holds {len(generated)} images.")
    return 0

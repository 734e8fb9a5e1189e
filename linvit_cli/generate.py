"""`linvit generate`."""

import argparse
from pathlib import Path

from linvit_cli.parser import number, whole
from linvit_cli.run_arguments import add_weights, call, chosen
from linvit_cli.streams import show, show_pieces

HELP = "Generate text or images with a trained network."
EXAMPLES = (
    "linvit generate runs/stdlib_bytes_rala --prompt 'import ' --temperature 0.7",
    "linvit generate runs/digits_mala --output digits.png --classes 3 7 --guidance 2",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit generate RUN [options]; images need --output FILE"
    network = command.add_argument_group("what to generate with")
    network.add_argument(
        "path", metavar="RUN", help="folder of a run, a checkpoint of it, or a file from linvit export"
    )
    add_weights(network)
    network.add_argument("--seed", metavar="N", type=whole, help="seed of the random numbers (default: 0)")
    text = command.add_argument_group("language")
    text.add_argument("--prompt", metavar="TEXT", help="text to continue (default: none, the start of a document)")
    text.add_argument("--tokens", metavar="N", type=whole, help="maximum number of tokens (default: 256)")
    about = "softmax temperature; 0 always chooses the most likely token (default: 1)"
    text.add_argument("--temperature", metavar="T", type=number, help=about)
    about = "nucleus sampling: keep the most likely tokens up to this total probability (default: 1, off)"
    text.add_argument("--top-p", metavar="P", type=number, help=about)
    images = command.add_argument_group("image generation")
    about = "required for images: a grid (.png), or all of them as arrays (.npz) (default: none)"
    images.add_argument("--output", metavar="FILE", type=Path, help=about)
    about = "names of classes, or their numbers unless a class has a number as its name (default: all)"
    images.add_argument("--classes", metavar="CLASS", nargs="+", help=about)
    images.add_argument("--count", metavar="N", type=whole, help="images per class (default: 8)")
    about = "classifier-free guidance scale (default: 1, off)"
    images.add_argument("--guidance", metavar="G", type=number, help=about)
    images.add_argument("--steps", metavar="N", type=whole, help="sampling steps, up to 1,000 (default: 50)")
    images.add_argument("--sampler", choices=("ddim", "ddpm"), help="sampling algorithm (default: ddim)")
    about = "autoencoder of latents: a folder or a hub name (default: that of the training data)"
    images.add_argument("--vae", metavar="VAE", dest="autoencoder", help=about)


def run(options: argparse.Namespace) -> int:
    from linvit.runs.loading import load_run
    from linvit.runs.tasks.diffusion import DiffusionRun

    loaded = load_run(options.path)
    if options.output is None and isinstance(loaded, DiffusionRun):
        raise ValueError("This run generates images: choose a file with --output FILE.png or FILE.npz.")
    names = ("prompt", "tokens", "temperature", "top_p", "classes", "count", "guidance", "steps", "sampler")
    generated = call(loaded, "generate", **chosen(options, *names, "autoencoder", "seed", "weights", "output"))
    if options.output is None:
        show_pieces(generated)
    else:
        show(f"{options.output} contains {len(generated)} images.")
    return 0

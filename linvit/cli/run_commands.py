"""The commands on runs and checkpoints: their arguments, and what is called with them."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from linvit.cli.failures import SOME_FAILED, say


def train_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit train RECIPE [key.key=value ...] [--resume] [--compile] [--print_config] [--debug]"
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file; key.key=value or --key.key value overrides it")
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the run's folder")
    command.add_argument(
        "--compile", action="store_true", help="train through torch.compile; same as task.compile=true"
    )
    command.add_argument("--print_config", action="store_true", help="print every value of the recipe and stop")


def run_train(options: argparse.Namespace) -> int:
    overrides = _overrides(options.rest) + ["task.compile=true"] * options.compile
    if options.print_config:
        import yaml

        from linvit.runs.recipe import RecipeCLI, read_recipe

        resolved = RecipeCLI(read_recipe(options.recipe, overrides), builds=False).resolved()
        print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
        return 0
    from linvit.runs.train import train

    folder = train(options.recipe, overrides, options.resume)
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    if rank_zero_only.rank == 0:
        print(f"Done: {folder}/checkpoints holds best.ckpt and last.ckpt, {folder}/metrics.csv the curves.")
    return 0


def _overrides(rest: Sequence[str]) -> list[str]:
    """Both `a.b=c` and `--a.b c` or `--a.b=c`, as `a.b=c`."""
    overrides: list[str] = []
    waiting = ""
    for part in rest:
        if waiting:
            overrides.append(f"{waiting}={part}")
            waiting = ""
        elif part.startswith("--") and "=" not in part:
            waiting = part[2:]
        else:
            overrides.append(part.removeprefix("--"))
    return [*overrides, waiting] if waiting else overrides


def network_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="NAME", help="a model's name, for weights that do not say theirs")
    command.add_argument("--checkpoint", metavar="FILE", help="weights of --model, released (.pth) or converted")


def framework_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--framework", metavar="NAME", help="such as mask_rcnn, for a released one on --model")


def allocator_argument(command: argparse.ArgumentParser) -> None:
    text = "keep freed memory in the process: fewer page faults, a larger process (Linux, docs/fuse.md)"
    command.add_argument("--keep-memory", action="store_true", help=text)


def set_allocator(options: argparse.Namespace) -> None:
    """Does what --keep-memory asks for; a ValueError where the C library cannot."""
    from linvit.allocator import keep_memory

    if options.keep_memory and not keep_memory():
        raise ValueError("--keep-memory needs glibc, Linux's usual C library, which is not here: leave it out.")


def decoding_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--beam", metavar="N", type=int, help="of speech: beginnings of the text that are kept (1)")
    command.add_argument("--lm", metavar="FILE", help="of speech: n-grams of words for the beam")
    command.add_argument("--lm-weight", metavar="W", type=float, default=0.5, help="of their logarithms (0.5)")
    command.add_argument("--word-bonus", metavar="B", type=float, default=0.0, help="added for each word (0)")


def decode_as_asked(options: argparse.Namespace, restored: Any) -> None:
    """Does what the decoding arguments ask for; a ValueError for a run that hears no speech."""
    if options.beam is None and options.lm is None:
        return
    if not restored.hearing:
        raise ValueError("--beam and --lm are for speech, which this run does not hear: leave them out.")
    from linvit.runs.transcribe import set_decoding

    set_decoding(restored, options.beam, options.lm, options.lm_weight, options.word_bonus)


def eval_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit eval (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) [--data DATA] [--json]"
        " [--report [FILE]] [--tasks TASK ... [--include FOLDER] [--limit N]] [--beam N [--lm FILE]]"
    )
    command.add_argument("path", metavar="RUN", nargs="?", help="a run's folder or a checkpoint of it")
    network_arguments(command)
    framework_argument(command)
    command.add_argument(
        "--data", help="digits, stdlib, or a folder of classes, .txt files or speech; by default the data of the run"
    )
    command.add_argument("--workers", type=int, help="processes that read images")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--report", metavar="FILE", nargs="?", const="", help="write a page (RUN/report.html)")
    command.add_argument("--tasks", metavar="TASK", nargs="+", help="of lm-evaluation-harness, for language models")
    command.add_argument("--include", metavar="FOLDER", type=Path, help="of your own tasks, in place of the harness's")
    command.add_argument("--limit", type=int, help="items of each task (all)")
    decoding_arguments(command)


def run_eval(options: argparse.Namespace) -> int:
    from linvit.runs.evaluate import evaluate, show
    from linvit.runs.restore import restore

    if not options.tasks and (options.include or options.limit is not None):
        raise ValueError("--include and --limit are of --tasks, which is not given: add it, or leave them out.")
    if options.tasks and (options.data or options.report is not None):
        raise ValueError("--tasks bring data of their own and have no page: leave --data and --report out.")
    restored = restore(options.path, options.model, options.checkpoint, options.framework)
    if options.tasks:
        return _ask(options, restored)
    decode_as_asked(options, restored)
    measured = evaluate(restored, options.data, options.workers)
    show(measured, restored.path, as_json=options.json)
    if options.report is not None:
        from linvit.runs.report import report_path

        page = report_path(restored, options.report)
        _judge_of(restored).write_report(restored, measured, page, options.data, options.workers)
        print(f"{page} is the page to look at.", file=sys.stderr)
    return 0


def _judge_of(restored: Any) -> Any:
    """The module that writes the page of such a network."""
    from linvit.runs import report as judge
    from linvit.runs import report_dense as judge_dense
    from linvit.runs import report_generation as judge_drawn
    from linvit.runs import report_language as judge_text
    from linvit.runs import report_speech as judge_speech

    if restored.drawing:
        return judge_drawn
    if restored.hearing:
        return judge_speech
    if restored.sequence:
        return judge_text
    return judge_dense if restored.dense else judge


def _ask(options: argparse.Namespace, restored: Any) -> int:
    from linvit.runs.harness import ask, show

    found = ask(restored, options.tasks, options.include, options.limit)
    if options.json:
        import json

        print(json.dumps(found, default=str))
    else:
        show(found)
    return 0


def predict_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit predict (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) IMAGE_OR_FOLDER ..."
        " [--topk N] [--threshold SCORE] [--beam N [--lm FILE] | --stream SECONDS] [--weights raw|ema]"
        " [--output FILE|FOLDER]"
        " [--keep-memory]"
    )
    command.add_argument(
        "paths", metavar="PATH", nargs="+", help="a run or checkpoint, then image or sound files or folders"
    )
    network_arguments(command)
    framework_argument(command)
    command.add_argument("--topk", type=int, help="how many classes an image (5), for classifiers")
    command.add_argument("--threshold", type=float, help="least score of an object that is drawn (0.5), for detectors")
    decoding_arguments(command)
    command.add_argument(
        "--stream", type=float, metavar="SECONDS", help="hear one sound file in pieces, causal networks"
    )
    command.add_argument("--weights", choices=("raw", "ema"), help="by default the moving average where there is one")
    command.add_argument(
        "--output", metavar="PATH", help="instead of a table, a .csv or .json file, for dense tasks a folder"
    )
    allocator_argument(command)


def run_predict(options: argparse.Namespace) -> int:
    from linvit.runs.restore import restore

    run, *images = options.paths if options.model is None else [None, *options.paths]
    if not images:
        raise ValueError(
            "There is nothing to predict: give image or sound files or folders after the run or checkpoint."
        )
    set_allocator(options)
    restored = restore(run, options.model, options.checkpoint, options.framework)
    if restored.drawing:
        raise ValueError("This run draws images, it names none: `linvit generate RUN --output FILE.png` lets it draw.")
    if restored.sequence:
        raise ValueError("This run reads tokens, not images: `linvit generate RUN --prompt …` lets it write.")
    decode_as_asked(options, restored)
    if options.stream is not None:
        return _listen(options, restored, images)
    predicts = _transcribe if restored.hearing else _predict_dense if restored.dense else _predict_classes
    complaints = predicts(options, restored, images)
    for complaint in complaints:
        say(f"linvit: {complaint}", SOME_FAILED)
    return SOME_FAILED if complaints else 0


def _predict_classes(options: argparse.Namespace, restored: Any, images: Sequence[str]) -> list[str]:
    from linvit.runs.predict import check_output, predict, show, write

    if options.threshold is not None:
        raise ValueError("--threshold is for detectors, but this is a classifier: leave it out.")
    if options.output:
        check_output(options.output)
    topk = 5 if options.topk is None else options.topk
    predictions, complaints = predict(restored, images, topk, options.weights)
    if options.output:
        write(predictions, options.output)
        print(f"{len(predictions)} predictions in {options.output}")
    else:
        show(predictions)
    return complaints


def _transcribe(options: argparse.Namespace, restored: Any, sounds: Sequence[str]) -> list[str]:
    from linvit.runs.transcribe import check_output, show, transcribe, write

    if options.topk is not None or options.threshold is not None:
        raise ValueError("--topk and --threshold are for images, but this run hears speech: leave them out.")
    if options.output:
        check_output(options.output)
    told, complaints = transcribe(restored, sounds, options.weights)
    if options.output:
        write(told, options.output)
        print(f"{len(told)} transcripts in {options.output}")
    else:
        show(told)
    return complaints


def _listen(options: argparse.Namespace, restored: Any, sounds: Sequence[str]) -> int:
    from linvit.runs.screen import show_pieces
    from linvit.runs.stream import listen

    if not restored.hearing or len(sounds) > 1:
        raise ValueError("--stream hears one sound file, with the run of a network that hears speech.")
    if options.beam is not None or options.output:
        raise ValueError("--stream writes on the screen what it hears, greedily: leave --beam and --output out.")
    show_pieces(_added(listen(restored, sounds[0], options.stream, options.weights)))
    return 0


def _added(texts: Iterable[str]) -> Iterator[str]:
    """What each text has that the one before had not."""
    told = ""
    for text in texts:
        yield text[len(told) :]
        told = text


def _predict_dense(options: argparse.Namespace, restored: Any, images: Sequence[str]) -> list[str]:
    from linvit.runs.predict_dense import predict_dense, show

    if options.topk is not None:
        raise ValueError("--topk is for classifiers, but this is a detector or segmentor: leave it out.")
    told, complaints = predict_dense(restored, images, options.threshold, options.weights, options.output)
    if options.output:
        print(f"{len(told)} images looked at, pictures and predictions in {options.output}")
    else:
        show(told)
    return complaints


def generate_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit generate RUN [--seed N] [--weights raw|ema] ([--prompt TEXT] [--tokens N] [--temperature T] [--top-p P]"
        " | --output FILE [--classes CLASS ...] [--count N] [--guidance G] [--steps N] [--sampler NAME] [--vae VAE])"
    )
    command.add_argument("path", metavar="RUN", help="a run's folder or a checkpoint of it")
    command.add_argument("--prompt", default="", help="how the text begins (at the start of a document)")
    command.add_argument("--tokens", type=int, default=256, help="how many tokens at most (256)")
    command.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token (1)")
    command.add_argument("--top-p", type=float, default=1.0, help="draw from the tokens of this probability (1)")
    command.add_argument("--output", metavar="FILE", type=Path, help="of images: a .png grid, or all of them as .npz")
    command.add_argument("--classes", metavar="CLASS", nargs="+", help="of images: names or numbers (all)")
    command.add_argument("--count", type=int, default=8, help="images a class (8)")
    command.add_argument("--guidance", type=float, default=1.0, help="how far classes are exaggerated; 1 is not (1)")
    command.add_argument("--steps", type=int, default=50, help="sampling steps, up to 1,000 (50)")
    command.add_argument("--sampler", choices=("ddim", "ddpm"), default="ddim", help="how noise becomes images (ddim)")
    command.add_argument("--vae", help="autoencoder of latents, a folder or a name on the hub (that of the data)")
    command.add_argument("--seed", type=int, default=0, help="what is drawn from (0)")
    command.add_argument("--weights", choices=("raw", "ema"), help="by default the moving average where there is one")


def run_generate(options: argparse.Namespace) -> int:
    from linvit.runs.generate import write_text
    from linvit.runs.restore import restore
    from linvit.runs.screen import show_pieces

    restored = restore(options.path)
    if restored.drawing:
        return _draw(options, restored)
    if options.output is not None and restored.sequence:
        raise ValueError(
            "--output is of images, but this run writes text on the screen: leave it out, or write > FILE."
        )
    drawn = (options.tokens, options.temperature, options.top_p, options.seed)
    show_pieces(write_text(restored, options.prompt, *drawn, options.weights))
    return 0


def _draw(options: argparse.Namespace, restored: Any) -> int:
    from linvit.runs.draw import draw

    if options.output is None:
        raise ValueError("This run draws images: say where they go with --output FILE.png or FILE.npz.")
    drawn = draw(
        restored,
        options.output,
        options.classes,
        options.count,
        options.guidance,
        options.steps,
        options.sampler,
        options.seed,
        options.weights,
        options.vae,
    )
    print(f"{options.output} holds {drawn} images.")
    return 0


def convert_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="IN.pth", help="released weights")
    command.add_argument("target", metavar="OUT.safetensors", help="for timm.create_model(…, checkpoint_path=…)")
    command.add_argument("--model", required=True, metavar="NAME", help="the model that the weights belong to")


def run_convert(options: argparse.Namespace) -> int:
    from linvit.released import convert

    convert(options.source, Path(options.target), options.model)
    print(f"{options.target}: read it with timm.create_model({options.model!r}, checkpoint_path={options.target!r})")
    return 0

"""The command line: `linvit train | eval | predict | analyze | convert | models | demo | study | data`.

What a user can get wrong ends in one sentence on stderr and exit code 2; `--debug` shows where it came from.
Heavy imports wait until a command needs them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WRONG_USE, SOME_FAILED, STOPPED = 2, 1, 130
LISTED = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return _say("Stopped.", STOPPED)
    except Exception as error:
        if options.debug:
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    """One sentence for what a user can mend; anything else is a bug of ours and keeps its traceback."""
    if type(error).__name__ == "RunStoppedError":
        return _say(str(error), STOPPED)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("linvit"):
        package = (error.name or "").partition(".")[0]
        return _say(
            f"linvit: this command needs {package}: pip install 'linvit[train,dense,report]' brings it.", WRONG_USE
        )
    if type(error).__name__ == "MisconfigurationException":
        return _say(f"linvit: Lightning's trainer refuses this: {' '.join(str(error).split())}", WRONG_USE)
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return _say(
            f"linvit: A process that reads images died ({str(error).splitlines()[0].rstrip(' .')}), often for want of"
            " memory: lower data.num_workers (eval: --workers); a run goes on with --resume.",
            WRONG_USE,
        )
    if not isinstance(error, (ValueError, OSError, FloatingPointError)):
        raise error
    return _say(f"linvit: {error}", WRONG_USE)


def _say(sentence: str, code: int) -> int:
    first, *listed = sentence.strip().splitlines()  # a list of what does not fit may follow the sentence
    shown = [first, *listed[:LISTED]]
    if len(listed) > LISTED:
        shown.append(f"  … and {len(listed) - LISTED} more")
    print("\n".join(shown), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="linvit", description="Linear attention for vision: RAVLT, MAViT, CARE.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def _train_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit train RECIPE [key.key=value ...] [--resume] [--compile] [--print_config] [--debug]"
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file; key.key=value or --key.key value overrides it")
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the run's folder")
    command.add_argument(
        "--compile", action="store_true", help="train through torch.compile; same as task.compile=true"
    )
    command.add_argument("--print_config", action="store_true", help="print every value of the recipe and stop")


def _train(options: argparse.Namespace) -> int:
    overrides = _overrides(options.rest) + ["task.compile=true"] * options.compile
    if options.print_config:
        import yaml

        from linvit.cli.recipe import RecipeCLI, read_recipe

        resolved = RecipeCLI(read_recipe(options.recipe, overrides), builds=False).resolved()
        print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
        return 0
    from linvit.cli.train import train

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


def _network_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", metavar="NAME", help="a model's name, for weights that do not say theirs")
    command.add_argument("--checkpoint", metavar="FILE", help="weights of --model, released (.pth) or converted")


def _framework_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--framework", metavar="NAME", help="such as mask_rcnn, for a released one on --model")


def _eval_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit eval (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) [--data DATA] [--json]"
        " [--report [FILE]]"
    )
    command.add_argument("path", metavar="RUN", nargs="?", help="a run's folder or a checkpoint of it")
    _network_arguments(command)
    _framework_argument(command)
    command.add_argument("--data", help="digits, or a folder of class folders; by default the data of the run")
    command.add_argument("--workers", type=int, help="processes that read images")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    command.add_argument("--report", metavar="FILE", nargs="?", const="", help="write a page (RUN/report.html)")


def _eval(options: argparse.Namespace) -> int:
    from linvit.cli.evaluate import evaluate, show
    from linvit.cli.restore import restore

    restored = restore(options.path, options.model, options.checkpoint, options.framework)
    measured = evaluate(restored, options.data, options.workers)
    show(measured, restored.path, as_json=options.json)
    if options.report is not None:
        from linvit.cli import judge, judge_dense

        report_path, write_report = judge.report_path, (judge_dense if restored.dense else judge).write_report
        page = report_path(restored, options.report)
        write_report(restored, measured, page, options.data, options.workers)
        print(f"{page} is the page to look at.", file=sys.stderr)
    return 0


def _predict_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit predict (RUN | CHECKPOINT | --model NAME [--framework NAME] --checkpoint FILE) IMAGE_OR_FOLDER ..."
        " [--topk N] [--threshold SCORE] [--weights raw|ema] [--output FILE|FOLDER]"
    )
    command.add_argument("paths", metavar="PATH", nargs="+", help="a run or checkpoint, then image files or folders")
    _network_arguments(command)
    _framework_argument(command)
    command.add_argument("--topk", type=int, help="how many classes an image (5), for classifiers")
    command.add_argument("--threshold", type=float, help="least score of an object that is drawn (0.5), for detectors")
    command.add_argument("--weights", choices=("raw", "ema"), help="by default the moving average where there is one")
    command.add_argument(
        "--output", metavar="PATH", help="instead of a table, a .csv or .json file, for dense tasks a folder"
    )


def _predict(options: argparse.Namespace) -> int:
    from linvit.cli.restore import restore

    run, *images = options.paths if options.model is None else [None, *options.paths]
    if not images:
        raise ValueError("There is nothing to predict: give image files or folders after the run or checkpoint.")
    restored = restore(run, options.model, options.checkpoint, options.framework)
    complaints = (_predict_dense if restored.dense else _predict_classes)(options, restored, images)
    for complaint in complaints:
        _say(f"linvit: {complaint}", SOME_FAILED)
    return SOME_FAILED if complaints else 0


def _predict_classes(options: argparse.Namespace, restored: Any, images: Sequence[str]) -> list[str]:
    from linvit.cli.predict import check_output, predict, show, write

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


def _predict_dense(options: argparse.Namespace, restored: Any, images: Sequence[str]) -> list[str]:
    from linvit.cli.predict_dense import predict_dense, show

    if options.topk is not None:
        raise ValueError("--topk is for classifiers, but this is a detector or segmentor: leave it out.")
    told, complaints = predict_dense(restored, images, options.threshold, options.weights, options.output)
    if options.output:
        print(f"{len(told)} images looked at, pictures and predictions in {options.output}")
    else:
        show(told)
    return complaints


def _convert_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="IN.pth", help="released weights")
    command.add_argument("target", metavar="OUT.safetensors", help="for timm.create_model(…, checkpoint_path=…)")
    command.add_argument("--model", required=True, metavar="NAME", help="the model that the weights belong to")


def _convert(options: argparse.Namespace) -> int:
    from linvit.released import convert

    convert(options.source, Path(options.target), options.model)
    print(f"{options.target}: read it with timm.create_model({options.model!r}, checkpoint_path={options.target!r})")
    return 0


def _models_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--family", help="only this family, such as ravlt or swin_tiny")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--recipes", metavar="PATH", nargs="+", help="what these recipes train, against their bases")
    which.add_argument("--dense", action="store_true", help="detectors and segmentors on RAVLT and MAViT")
    command.add_argument("--json", action="store_true", help="print one JSON list instead of a table")


def _models(options: argparse.Namespace) -> int:
    from linvit.cli.models import describe_all, describe_recipes, model_names, recipe_files, show, show_recipes

    if options.recipes and options.family:
        raise ValueError("--family and --recipes exclude each other: give one of them.")
    if options.recipes:
        rows, show = describe_recipes(recipe_files(options.recipes)), show_recipes
    elif options.dense:
        from linvit.cli.dense_models import describe_dense, show_dense

        rows, show = describe_dense(options.family), show_dense
    else:
        rows = describe_all(model_names(options.family))
    if options.json:
        import json

        print(json.dumps(rows))
    else:
        show(rows)
    return 0


def _demo_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, default=Path("recipes/demo"), help="folder of recipes (recipes/demo)")
    command.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where runs and page go (runs/demo)")


def _demo(options: argparse.Namespace) -> int:
    from linvit.cli.demo import demo

    demo(options.recipes, options.folder)
    return 0


def _analyze_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "linvit analyze [rank | scores | magnitude | all] (RUN | CHECKPOINT | --model NAME [--checkpoint FILE])"
        " [--images PATH ...] [--output FOLDER]"
    )
    command.add_argument("paths", metavar="WHAT", nargs="*", help="what to measure (all), then a run or a checkpoint")
    _network_arguments(command)
    command.add_argument("--images", metavar="PATH", nargs="+", help="image files or folders (the run's held-out data)")
    command.add_argument("--output", metavar="FOLDER", help="where figures, numbers and page go (RUN/analysis)")
    command.add_argument("--layers", metavar="LAYER", nargs="+", help="names or numbers of attention layers (all)")
    command.add_argument("--count", type=int, default=64, help="how many images ranks are averaged over (64)")
    command.add_argument(
        "--query", type=float, nargs=2, default=(0.5, 0.5), metavar=("Y", "X"), help="whose scores are drawn (0.5 0.5)"
    )


def _analyze(options: argparse.Namespace) -> int:
    from linvit.cli.analyze import ANALYSES, analyze

    known = (*ANALYSES, "all")
    names_analysis = bool(options.paths) and options.paths[0] in known
    what, paths = (options.paths[0], options.paths[1:]) if names_analysis else ("all", options.paths)
    if len(paths) > 1:
        raise ValueError(
            f"analyze got {' '.join(paths)}, expected one of {', '.join(known)} and one run or checkpoint."
        )
    page, complaints = analyze(
        what,
        paths[0] if paths else None,
        options.model,
        options.checkpoint,
        options.images,
        options.output,
        options.layers,
        options.count,
        tuple(options.query),
    )
    for complaint in complaints:
        _say(f"linvit: {complaint}", SOME_FAILED)
    print(f"{page} is the page to look at.")
    return SOME_FAILED if complaints else 0


def _study_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipes", type=Path, default=Path("recipes/study"), help="their folder (recipes/study)")
    command.add_argument(
        "--folder", type=Path, default=Path("runs/study"), help="where runs and tables go (runs/study)"
    )
    command.add_argument("--seeds", type=int, default=5, help="how many seeds a variant (5)")
    command.add_argument("--workers", type=int, default=2, help="how many runs at once, one thread each (2)")
    command.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the marks of a .md file")


def _study(options: argparse.Namespace) -> int:
    from linvit.cli.study import study

    study(options.recipes, options.folder, options.seeds, options.workers, options.write)
    return 0


def _data_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit data (make-scenes FOLDER [--train N] [--val N] [--size N] [--seed N] | check FOLDER|FILE)"
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", prog="linvit data")
    text = "Write scenes of real handwritten digits, in COCO's format and in ADE20K's."
    scenes = actions.add_parser("make-scenes", help=text, description=text, allow_abbrev=False)
    scenes.add_argument("folder", metavar="FOLDER", help="a new or empty folder; detection/ and segmentation/ go there")
    scenes.add_argument("--train", type=int, default=1000, help="how many training scenes (1000)")
    scenes.add_argument("--val", type=int, default=200, help="how many validation scenes (200)")
    scenes.add_argument("--size", type=int, default=128, help="height and width in pixels (128)")
    scenes.add_argument("--seed", type=int, default=0, help="what the scenes are drawn from (0)")
    text = "Read every image and annotation of a data set and name what is wrong with them."
    check = actions.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("path", metavar="FOLDER|FILE", type=Path, help="in COCO's or ADE20K's layout, or a COCO .json")
    check.add_argument("--boxes", action="store_true", help="objects have boxes alone: look for no masks")
    check.add_argument("--labels", type=int, help="number of classes of label maps (the folder's table, else 150)")


def _data(options: argparse.Namespace) -> int:
    from linvit.cli.data import check, make, show

    if options.action == "make-scenes":
        make(options.folder, options.train, options.val, options.size, options.seed)
        return 0
    checked = check(options.path, options.labels, not options.boxes)
    show(checked)
    complaints = [complaint for part in checked for complaint in part.complaints]
    if complaints:
        listed = [f"  {complaint}" for complaint in complaints]
        return _say("\n".join([f"linvit: {len(complaints)} things are wrong:", *listed]), SOME_FAILED)
    return 0


COMMANDS = {
    "train": (_train_arguments, _train, "Train what a recipe says, into a folder; stop and go on at any time."),
    "eval": (_eval_arguments, _eval, "Measure accuracy, AP or mIoU of a run, every image once."),
    "predict": (_predict_arguments, _predict, "Name the classes of image files, or draw their objects or regions."),
    "analyze": (_analyze_arguments, _analyze, "Measure ranks, scores and magnitudes inside a network's attention."),
    "convert": (_convert_arguments, _convert, "Turn released weights into a file that timm reads."),
    "demo": (_demo_arguments, _demo, "Train four small networks on real digits and write a page to look at."),
    "study": (_study_arguments, _study, "Train every mechanism over seeds, compare, and judge the papers' claims."),
    "data": (
        _data_arguments,
        _data,
        "Make scenes of digits for dense tasks, or check detection and segmentation data.",
    ),
    "models": (_models_arguments, _models, "List the models with size, cost and published accuracy."),
}

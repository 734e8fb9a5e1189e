"""The weights of a classifier's run as a file that timm reads, with a model card that says where they come from."""

import contextlib
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import Tensor

from linvit.analysis.markdown import markdown_table, plain
from linvit.errors import refuse
from linvit.files import BEST, write_text
from linvit.models.by_name import bundled_weights
from linvit.released import rounded, write_weights
from linvit.runs.evaluate import Measures, evaluate
from linvit.runs.folder import ENVIRONMENT
from linvit.runs.recipe_values import dump_yaml, publishable
from linvit.runs.run import Run
from linvit.tasks.classification import Classification

PLACES = {"root", "batch_size", "num_workers"}
WIDEST = 120  # columns of a line of code in a card
BEST_EPOCH = "The epoch with the best score on the measured images was taken, so the measures are slightly too good."


@dataclass(frozen=True)
class Origin:
    """Where weights come from: their run, its measures and number of training samples, and what the user says."""

    run: Run
    weights: Mapping[str, Tensor]
    recipe: dict[str, Any]
    measures: Measures
    trained_on: int | None
    half: bool
    note: str | None
    license: str | None

    @property
    def model(self) -> dict[str, Any]:
        return dict(self.recipe["model"])

    @property
    def commits(self) -> str:
        """The commits of linvit that trained the run, one after the other if it was resumed with another."""
        path = self.run.folder / ENVIRONMENT
        entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return ", ".join(dict.fromkeys(str(entry["commit"]) for entry in entries if entry["commit"])) or "unknown"

    @property
    def limits(self) -> list[str]:
        height, width = self.run.preprocessing.size
        limits = [
            f"Every image is given one of the {len(self.run.class_names)} classes, even if it shows none of them.",
            f"Trained and measured with images of {height}×{width} px; larger ones are scaled down to that. The"
            " accuracy at other sizes, and on other data, is unknown.",
        ]
        chosen = self.run.path is not None and self.run.path.name == BEST
        return limits + [BEST_EPOCH] * chosen + ([self.note] if self.note else [])


def write_weight_file(origin: Origin, target: Path) -> Path:
    """Writes the weights and, next to them, the model card."""
    write_weights(origin.weights, target, header(origin))
    write_text(target.with_suffix(".md"), card(origin, target.stem, _use(origin, target)))
    return target


def origin_of(
    run: Run,
    settings: dict[str, Any],
    *,
    half: bool = False,
    note: str | None,
    license: str | None,
    measures: Measures | None,
    progress: bool,
) -> Origin:
    """What the card of a classifier's weights says, measured on its data, with these settings, unless it is given."""
    refuse(
        *(
            f"`{name}` would describe other data than those of the run: only `root`, `batch_size` and `num_workers`"
            " may change, leave it out."
            for name in settings.keys() - PLACES
        ),
        run.recipe is None
        and f"{run.name} comes without a recipe, expected a run of classification that `linvit train` made: give one.",
    )
    source, recipe = run.source(**settings), dict(run.recipe or {})
    recipe["trainer"] = {key: value for key, value in recipe["trainer"].items() if value is not None}
    weights: Mapping[str, Tensor] = run.network.state_dict()
    if half:
        weights = rounded(weights)
    count = None
    with contextlib.suppress(TypeError, ValueError):  # a stream has no length, held-out samples have no train set
        count = len(source.train_set()) or None  # type: ignore[arg-type]
    if not measures:
        network = copy.deepcopy(run.network)
        network.load_state_dict(weights)
        task = Classification(network, len(run.class_names), run.preprocessing.channels)
        measures = evaluate(replace(run, task=task), source, progress)
    return Origin(run, weights, publishable(recipe), measures, count, half, note, license)


def header(origin: Origin) -> dict[str, str]:
    """What the file of weights says about itself; safetensors allows only text."""
    metadata = {
        "model": origin.model,
        "class_names": origin.run.class_names,
        "preprocessing": asdict(origin.run.preprocessing),
        "trained_on": origin.trained_on,
        "measures": dict(origin.measures),
        "recipe": origin.recipe,
        "seed": origin.recipe.get("seed"),
        "commit": origin.commits,
        "limits": origin.limits,
        "license": origin.license,
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def card(origin: Origin, title: str, use: str) -> str:
    """The model card; use: Markdown with the code that loads the weights."""
    facts = [(name, plain(fact)) for name, fact in _facts(origin).items()]
    recipe, data = dump_yaml(origin.recipe), origin.recipe["data"]["name"]
    top1 = round(100 * origin.measures["top1"], 2)
    fence = "`" * max(3, *(1 + len(ticks) for ticks in re.findall("`+", recipe)), 3)
    return model_card(
        plain(title),
        f"Weights of `{origin.model['name']}`, trained and written by linvit.\n\n"
        + markdown_table(("", ""), facts, left=2),
        {
            "Use": use,
            "Limits": "\n".join(f"- {plain(limit)}" for limit in origin.limits),
            "Recipe": f"{fence}yaml\n{recipe}{fence}",
        },
        license=origin.license,
        results=[EvalResult("image-classification", data, f"{data}, held out", "accuracy", top1)],
    )


def _facts(origin: Origin) -> dict[str, str]:
    run, measures = origin.run, origin.measures
    inputs = run.preprocessing
    pixels = f"{inputs.channels}×{inputs.size[0]}×{inputs.size[1]} px"
    measured = {measures.declared[name].heading: measures.declared[name].cell(measures[name]) for name in measures}
    return {
        "parameters": f"{sum(parameter.numel() for parameter in run.network.parameters()):,}",
        "weights": f"{run.weights}, {'float16' if origin.half else 'float32'}",
        "input": f"{pixels}, {inputs.interpolation}, crop {inputs.crop_pct:g}",
        "mean, std": f"{', '.join(map(str, inputs.mean))}; {', '.join(map(str, inputs.std))}",
        "classes": ", ".join(run.class_names),
        "data": origin.recipe["data"]["name"],
        "images to train on": f"{origin.trained_on:,}" if origin.trained_on else "unknown",
        "epochs": str(origin.recipe["trainer"].get("max_epochs")),
        "seed": str(origin.recipe.get("seed")),
        **{f"{heading}, held out": value for heading, value in measured.items()},
        "commit of linvit": origin.commits,
    }


def _use(origin: Origin, target: Path) -> str:
    bundled = bundled_weights(target.stem)
    if bundled is not None and bundled.name == target.name:
        return creation(target.stem, pretrained=True)
    model = {"num_classes": len(origin.run.class_names), "in_chans": origin.run.preprocessing.channels}
    model |= {key: value for key, value in origin.model.items() if key not in ("name", "checkpoint_path")}
    return creation(origin.model["name"], **model, checkpoint_path=target.name)


def model_card(
    title: str, text: str, sections: Mapping[str, str], results: list[EvalResult] | None = None, **matter: Any
) -> str:
    """A card as Markdown, with the front matter that timm and the Hugging Face hub read.

    Args:
        title, text: the name of the network or file, and what comes before the first section.
        sections: heading → Markdown.
        results: measures that the hub shows.
        matter: license of the weights and datasets, in the notation of the hub; tags besides those of every card.
    """
    data = ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "linvit", *matter.pop("tags", ())],
        metrics=["accuracy"],
        eval_results=results,
        model_name=title if results else None,
        **matter,
    )
    parts = [f"## {heading}\n\n{content.strip()}\n" for heading, content in sections.items()]
    return "\n".join((f"---\n{data.to_yaml()}\n---", f"# {title}\n", f"{text.strip()}\n", *parts))


def creation(name: str, **arguments: Any) -> str:
    """A block of Python that creates a network through timm."""
    texts = [repr(name), *(f"{key}={value!r}" for key, value in arguments.items())]
    line = ", ".join(texts)
    call = f"model = timm.create_model({line}).eval()"
    if len(call) > WIDEST:
        indented = f"    {line}\n"
        if len(indented) > WIDEST:
            indented = "".join(f"    {text},\n" for text in texts)
        call = f"model = timm.create_model(\n{indented}).eval()"
    call = call.replace("'", '"')
    return f"```python\nimport timm\n\nimport linvit  # registers the models with timm\n\n{call}\n```"

"""timm's models and others by name and arguments; each that is unknown or contradicts the data is one sentence."""

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import timm
from torch import nn

from linvit.errors import SettingError, quoted, refuse
from linvit.files import read_checkpoint
from linvit.models import conformer, dit, sequence
from linvit.ranges import Range, check, lookup

RATES = ("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate")
KNOWN = {**dict.fromkeys(RATES, Annotated[float, Range(0, below=1)] | None), "checkpoint_path": str | Path | None}


def create_classifier(model: Mapping[str, Any], num_classes: int, channels: int) -> nn.Module:
    """timm.create_model(**model) for the data's classes and channels; raises ValueError if they contradict."""
    given = {"num_classes": num_classes, "in_chans": channels}
    arguments = {**given, **model}
    name = arguments.pop("name", None)
    config = arguments.get("pretrained_cfg")
    pools = [settings.get("global_pool") for settings in (arguments, config) if isinstance(settings, Mapping)]
    refuse(
        (arguments.get("features_only") or isinstance(config, str) or "" in pools)
        and "A classifier cannot be created with `features_only`, an empty `global_pool`, or text as `pretrained_cfg`:"
        " remove them.",
        *(
            arguments[key] != number
            and f"`{key}` is {arguments[key]} but the data has {number}: remove it, the data sets it."
            for key, number in given.items()
        ),
    )
    with known_arguments(name, arguments):
        return timm.create_model(name, **arguments)


@contextmanager
def known_arguments(name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Raises ValueError, offering the nearest, for a model unknown to timm and an argument that the model lacks.

    Rates of dropout and stochastic depth are checked. Weights are never downloaded.
    """
    check_model(name)
    if arguments.get("pretrained"):
        raise SettingError(
            f"`pretrained` is {quoted(arguments['pretrained'])}, but weights are never downloaded here: leave it out,"
            " and start from a run or a file of weights."
        )
    check(KNOWN, arguments)
    file = arguments.get("checkpoint_path")
    if file:
        read_checkpoint(file)  # its sentences
    try:
        yield
    except RuntimeError as error:
        if not file:
            raise
        raise ValueError(f"The weights in {file} do not fit {name}: give weights of this network.") from error
    except TypeError as error:
        twice = re.search(r"got multiple values for (?:keyword )?argument '(\w+)'", str(error))
        if twice:
            raise SettingError(
                f"`{twice[1]}` is set by {name} itself: leave it out, or choose another model."
            ) from error
        unknown = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
        base = arguments.get("base", name)
        names = (name, str(base["name"] if isinstance(base, Mapping) else base))
        modules = [inspect.getmodule(timm.model_entrypoint(each)) for each in names if timm.is_model(each)]
        owners = [getattr(module, unknown[1], None) for module in modules] if unknown else []
        owner = next((owner for owner in reversed(owners) if owner is not None), None)
        if unknown is None or owner is None:
            raise
        name = names[-1]
        near = difflib.get_close_matches(unknown[2], inspect.signature(owner).parameters, n=1, cutoff=0.0)
        raise SettingError(f"{name} has no argument {unknown[2]!r}: did you mean `{near[0]}`?") from error


def is_ours(name: str) -> bool:
    """Whether linvit registered this network with timm."""
    return timm.model_entrypoint(name).__module__.startswith("linvit.")


def bundled_weights(name: str) -> Path | None:
    """The file of weights that comes with linvit for this network and tag, such as mavit_nano.cifar10; None without."""
    config = timm.get_pretrained_cfg(name) if name in timm.list_pretrained(name) else None
    return Path(config.file) if config and config.file else None


def start_weights(source: str | Path) -> str | Path:
    """The file of the weights that come with linvit if `source` names them and is no path that exists; else source."""
    return source if Path(source).exists() else bundled_weights(str(source)) or source


def bundled_names() -> list[str]:
    """The networks, with their tags, whose weights are in this copy of linvit."""
    files = {name: bundled_weights(name) for name in timm.list_pretrained("*.cifar10")}
    return [name for name, file in files.items() if file and file.is_file()]


def check_model(name: str) -> None:
    """Raises ValueError, offering the nearest name, for a model that timm does not know or would fetch by its name."""
    if not name or not isinstance(name, str):
        raise SettingError(
            f"`name` is {quoted(name)}, expected the name of a model: set it to one that `linvit models` lists."
        )
    if ":" in name:
        raise ValueError(
            f"The model {name!r} would be read from a hub or a folder: download its weights yourself, and give an"
            " architecture that timm knows, with a file of weights."
        )
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1, cutoff=0.0)
        raise ValueError(f"Unknown model {name!r}: did you mean {near[0]!r}? `linvit models` lists ours.")
    architecture, dot, tag = name.partition(".")
    tagged = timm.list_models(f"{architecture}.*", include_tags=True)
    if dot and name not in tagged:
        raise ValueError(f"Unknown tag {tag!r} of the model {architecture!r}: choose {' or '.join(tagged)}.")


class Family(NamedTuple):
    """A class whose first argument is the number of outputs, its plural for messages, and its named sizes."""

    network: type[nn.Module]
    plural: str
    sizes: Mapping[str, Mapping[str, int]]


FAMILIES = {
    "sequence": Family(sequence.Decoder, "decoders", sequence.SIZES),
    "speech": Family(conformer.Conformer, "networks for speech recognition", conformer.SIZES),
    "generation": Family(dit.DiT, "image generators", dit.SIZES),
}


def create(name: str, outputs: int, /, *, family: str | None = None, **arguments: Any) -> nn.Module:
    """A network by its name, with that number of outputs.

    Args:
        name: such as "sequence_nano", "conformer_small" or "dit_small_patch2".
        outputs: number of tokens or classes.
        family: a key of FAMILIES, to accept only its names.
        arguments: of the network's class; they override those of the name.

    Raises ValueError for an unknown name or argument; the message offers the nearest.
    """
    check({"name": str}, {"name": name})
    families = FAMILIES.values() if family is None else [lookup("family", family, FAMILIES)]
    names = {size: entry for entry in families for size in entry.sizes}
    if name not in names:
        plural = " and ".join(entry.plural for entry in families)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"Unknown model {name!r}: did you mean {near!r}? The {plural} are {', '.join(names)}.")
    network, sizes = names[name].network, names[name].sizes[name]
    known_arguments = list(inspect.signature(network).parameters)[1:]
    for argument in arguments:
        if argument not in known_arguments:
            near = difflib.get_close_matches(argument, known_arguments, n=1, cutoff=0.0)[0]
            raise SettingError(f"{name} has no argument {argument!r}: did you mean `{near}`?")
    return network(outputs, **{**sizes, **arguments})

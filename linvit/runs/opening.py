"""Whether data fit a network: for a training, its teachers, and the evaluation of a run."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from timm.layers import PatchEmbed
from torch import nn

from linvit.data.images.image import Preprocessing
from linvit.data.source import Source, listed
from linvit.errors import SettingError
from linvit.files import read_checkpoint, weights_file
from linvit.runs.trained import Trained


def prepared_for(run: Trained, source: Source, changes: dict[str, Any]) -> Source:
    """Gives the source the run's preprocessing, except for the settings in `changes`, and returns it.

    Raises ValueError if the images do not have the network's number of channels.
    """
    if "channels" in changes and source.channels != run.preprocessing.channels:
        raise SettingError(
            f"`channels` is {source.channels}, but the network expects {run.preprocessing.channels}: leave it out."
        )
    names = {field.name for field in fields(run.preprocessing)} & changes.keys()
    values = {name: getattr(source.preprocessing, name) for name in names}
    source.preprocessing = replace(run.preprocessing, **values)
    check_size(run.network, source, "network")
    return source


def check_size(network: nn.Module, source: Source, owner: str) -> None:
    """Raises ValueError if a network takes images of one size only, and those of the source have another."""
    about = source.preprocessing
    if not isinstance(about, Preprocessing) or about.resize != "crop":
        return
    for module in network.modules():
        if isinstance(module, PatchEmbed) and module.strict_img_size and module.img_size not in (None, about.size):
            given, taken = (f"{height}×{width}" for height, width in (about.size, module.img_size))
            raise SettingError(
                f"`size` is {given} px, but the {owner} takes {taken}: set it to that, or create the {owner} with"
                f" img_size={list(about.size)} or dynamic_img_size=true."
            )


def recorded(weights: str) -> Mapping[str, Any]:
    """What a run's checkpoint says about its data; nothing for other files of weights."""
    path = weights_file(weights)
    content = read_checkpoint(path) if path.is_file() else {}
    about = content.get("linvit")
    return about if isinstance(about, Mapping) else {}


def check_teacher(weights: str, source: Source) -> None:
    """Raises ValueError if a teacher's run has other classes or another normalization than the data."""
    about = recorded(weights)
    names, expected = about.get("class_names"), source.class_names
    if names and expected and list(names) != list(expected):
        raise ValueError(
            f"The teacher in {weights} predicts the classes {listed(names)}, but the data has {listed(expected)}:"
            " give a teacher with these classes in this order."
        )
    for name in ("mean", "std"):
        before = about.get("preprocessing", {}).get(name)
        now = getattr(source.preprocessing, name, None)
        if before is not None and now is not None and list(before) != list(now):
            raise SettingError(
                f"`{name}` is {list(now)}, but the teacher in {weights} was trained with {list(before)}: use"
                " the teacher's."
            )

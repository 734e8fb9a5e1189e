"""Shared by image tasks: opening the data on which a run is evaluated."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from linvit.data.source import Source

if TYPE_CHECKING:
    from linvit.runs.run import Run


def prepared_for(run: "Run", source: Source, given: dict[str, Any]) -> Source:
    """Gives the source the run's preprocessing, except for explicitly given settings, and returns it.

    Raises ValueError if the images do not have the network's number of channels.
    """
    if "channels" in given and source.channels != run.preprocessing.channels:
        raise ValueError(
            f"`channels` is {source.channels}, but the network expects {run.preprocessing.channels}: leave it out."
        )
    names = {field.name for field in fields(run.preprocessing)} & given.keys()
    values = {name: getattr(source.preprocessing, name) for name in names}
    source.preprocessing = replace(run.preprocessing, **values)
    return source

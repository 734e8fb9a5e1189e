"""What tasks of images share when they open the data that a run is evaluated on."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from linvit.data.source import Source

if TYPE_CHECKING:
    from linvit.runs.run import Run


def prepared_for(run: "Run", source: Source, given: dict[str, Any]) -> Source:
    """The source itself, with the run's preprocessing but for the settings that were given.

    Raises ValueError for images of another number of channels than the network takes.
    """
    if "channels" in given and source.channels != run.preprocessing.channels:
        raise ValueError(
            f"`channels` is {source.channels}, but the network takes {run.preprocessing.channels}: leave it out."
        )
    names = {field.name for field in fields(run.preprocessing)} & given.keys()
    values = {name: getattr(source.preprocessing, name) for name in names}
    source.preprocessing = replace(run.preprocessing, **values)
    return source

"""What the tasks share when they open the data that a run is evaluated on."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from linvit.data.source import Source

if TYPE_CHECKING:
    from linvit.runs.run import Run


def changed_settings(run: "Run", name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings in which data differs from that of the run; all of them where it is another source."""
    data = (run.recipe or {}).get("data") or {}
    stored = data if name == data.get("name") else {}
    return {key: value for key, value in settings.items() if key not in stored or stored[key] != value}


def prepared_for(run: "Run", source: Source, changed: dict[str, Any]) -> Source:
    """The source itself, with the run's preprocessing but for the settings that were changed.

    Raises ValueError for images of another number of channels than the network takes.
    """
    if "channels" in changed and source.channels != run.preprocessing.channels:
        raise ValueError(
            f"`channels` is {source.channels}, but the network takes {run.preprocessing.channels}: leave it out."
        )
    given = {field.name for field in fields(run.preprocessing)} & changed.keys()
    values = {name: getattr(source.preprocessing, name) for name in given}
    source.preprocessing = replace(run.preprocessing, **values)
    return source

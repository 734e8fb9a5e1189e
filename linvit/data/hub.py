"""Data sets from the Hugging Face hub."""

from typing import Any, cast

from linvit.files import reason_of


def load_rows(arguments: dict[str, Any], split: str, streaming: bool = False, **columns: str) -> Any:
    """The rows of a split of a data set.

    arguments: of `datasets.load_dataset`. columns: the required columns, by the argument that sets them.

    Raises ValueError if the library refuses the arguments, or a column is missing.
    """
    import datasets

    try:
        rows = datasets.load_dataset(**arguments, split=split, streaming=streaming)
    except Exception as error:  # its class depends on the cause
        damaged = isinstance(error, datasets.exceptions.DatasetGenerationError)  # which says nothing itself
        reason = reason_of(cast(Exception, (damaged and error.__cause__) or error))
        advice = "repair the files, or use others" if damaged else "check `path`, `configuration` and the splits"
        raise ValueError(f"The data set {arguments['path']} cannot be read ({reason}): {advice}.") from error
    for argument, column in columns.items():
        if rows.column_names and column not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise ValueError(f"The data set has no column {column!r}: set `{argument}` to one of {known}.")
    return rows

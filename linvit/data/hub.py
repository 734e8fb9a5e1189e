"""Data sets of the Hugging Face hub."""

from typing import Any

from linvit.files import reason_of


def load_rows(arguments: dict[str, Any], split: str, streaming: bool = False, **columns: str) -> Any:
    """The rows of a split; `arguments` are arguments of `datasets.load_dataset`, columns those that it must have.

    Raises ValueError for what the library refuses, and for a missing column, by the argument that names it.
    """
    import datasets

    try:
        rows = datasets.load_dataset(**arguments, split=split, streaming=streaming)
    except Exception as error:  # the kind depends on what is wrong
        raise ValueError(
            f"The data set {arguments['path']} cannot be read ({reason_of(error)}): set `path`, `configuration` and the"
            " splits to what is there."
        ) from error
    for argument, column in columns.items():
        if rows.column_names and column not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise ValueError(f"The data set has no column {column!r}: set `{argument}` to one of {known}.")
    return rows

"""Data sets of the Hugging Face hub."""

from typing import Any

from linvit.data.source import reason_of


def load_rows(asked: dict[str, Any], split: str, streaming: bool = False) -> Any:
    """The rows of a split; `asked` are arguments of `datasets.load_dataset`. Raises ValueError for what it refuses."""
    import datasets

    try:
        return datasets.load_dataset(**asked, split=split, streaming=streaming)
    except Exception as error:  # the kind depends on what is wrong
        raise ValueError(
            f"The data set {asked['path']} cannot be read ({reason_of(error)}): set `path`, `configuration` and the"
            " splits to what is there."
        ) from error


def check_column(rows: Any, argument: str, column: str) -> None:
    """Raises ValueError where rows, whose columns are known, lack the one that an argument names."""
    if rows.column_names and column not in rows.column_names:
        raise ValueError(
            f"The data set has no column {column!r}: set `{argument}` to one of {', '.join(rows.column_names)}."
        )

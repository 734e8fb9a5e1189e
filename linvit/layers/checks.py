"""What the sizes of a network can be."""


def check_size(name: str, size: object, least: int = 1) -> None:
    """Raises ValueError for what is no whole number, or less than `least`."""
    if not isinstance(size, int) or size < least:
        raise ValueError(f"{name} is {size!r}, expected a whole number of {least} or more: change it")

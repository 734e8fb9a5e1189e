"""Progress of a benchmark: silent unless a caller shows it, as the command line does."""


class Progress:
    """Shows nothing; subclasses do."""

    def group(self, name: str, rounds: int) -> None:
        """A new group of cases is measured, in this many rounds."""

    def say(self, sentence: str) -> None:
        """The current step, in words."""

    def advance(self) -> None:
        """A round is finished."""

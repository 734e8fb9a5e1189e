"""What a benchmark tells while it runs; the command line shows it, tests and programs need not."""


class Progress:
    """Silent; a subclass shows it."""

    def group(self, name: str, rounds: int) -> None:
        """What is measured from now on, and in how many rounds."""

    def say(self, sentence: str) -> None:
        """What is done at the moment."""

    def advance(self) -> None:
        """One more round is over."""

"""What the formats of exported files share."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

from torch import Tensor

Session = Callable[..., tuple[Tensor, ...]]
"""From the network's inputs, such as images (batch, channels, height, width), to its outputs."""


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drops what converters and runtimes print about the processor, their progress and their use of torch."""
    kept = os.dup(2)
    # A StringIO, because packages imported here may keep a handler that writes to it: it must not be closed.
    with open(os.devnull, "w") as nowhere, redirect_stderr(io.StringIO()):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)

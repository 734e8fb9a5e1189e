"""Linear attention for vision: RALA/RAVLT, MALA/MAViT and CARE as one operator and timm models.

Importing this package registers its models with timm. `linvit.ops` alone needs only torch; `train` and `load_run` need
the extra `train`.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if find_spec("timm") and "linvit_cli" not in sys.modules:  # the command line imports what a command needs
    from linvit import models as models
    from linvit.fusion import fuse as fuse
    from linvit.models import linearize as linearize
    from linvit.models import swap_attention as swap_attention
    from linvit.released import load_released as load_released

if TYPE_CHECKING:
    from linvit.explorer import explore as explore
    from linvit.runs import Run as Run
    from linvit.runs import load_run as load_run
    from linvit.runs import push as push
    from linvit.runs import train as train
    from linvit.runs.exporting import export as export
    from linvit.streaming import stream as stream

ON_DEMAND = {
    "Run": "runs",
    "explore": "explorer",
    "export": "runs",
    "fuse": "fusion",
    "linearize": "models",
    "load_released": "released",
    "load_run": "runs",
    "push": "runs",
    "swap_attention": "models",
    "stream": "streaming",
    "train": "runs",
}


def __getattr__(name: str) -> Any:
    """Lightning and what else training needs are imported when they are asked for."""
    if name == "models":
        return import_module("linvit.models")
    if name not in ON_DEMAND:
        raise AttributeError(f"module 'linvit' has no attribute {name!r}")
    return getattr(import_module(f"linvit.{ON_DEMAND[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ON_DEMAND})

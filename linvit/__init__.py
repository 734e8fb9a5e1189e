"""Linear attention for vision: RALA/RAVLT, MALA/MAViT and CARE as one operator and timm models.

Importing this package registers its models with timm. `linvit.ops` alone needs only torch; `train` and `load_run` need
the extra `train`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__all__ = [
    "Run",
    "explore",
    "export",
    "fuse",
    "linearize",
    "list_mechanisms",
    "list_recipes",
    "load_released",
    "load_run",
    "models",
    "new_recipe",
    "run_in_strips",
    "swap_attention",
    "train",
]
__version__ = "0.1.0"

if find_spec("timm"):
    from linvit import models
    from linvit.fusion import fuse
    from linvit.layers.mechanisms import list_mechanisms
    from linvit.models import linearize, swap_attention
    from linvit.released import load_released

if TYPE_CHECKING:
    from linvit.explorer import explore
    from linvit.runs import Run, export, list_recipes, load_run, new_recipe, train
    from linvit.streaming import run_in_strips

ON_DEMAND = {
    "Run": "runs",
    "explore": "explorer",
    "export": "runs",
    "list_recipes": "runs",
    "load_run": "runs",
    "new_recipe": "runs",
    "run_in_strips": "streaming",
    "train": "runs",
}


def __getattr__(name: str) -> Any:
    """Lightning and what else training needs are imported when they are asked for."""
    if name not in ON_DEMAND:
        raise AttributeError(f"module 'linvit' has no attribute {name!r}")
    return getattr(import_module(f"linvit.{ON_DEMAND[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ON_DEMAND})

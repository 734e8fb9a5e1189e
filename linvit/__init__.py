"""Linear attention for vision: RALA/RAVLT, MALA/MAViT and CARE as one operator and timm models.

Importing this package registers its models with timm. `linvit.ops` alone needs only torch; `train` and `load_run` need
the extra `train`.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__all__ = [
    "Run",
    "explore",
    "export",
    "fast",
    "fuse",
    "linearize",
    "list_mechanisms",
    "list_recipes",
    "load_released",
    "load_run",
    "models",
    "new_recipe",
    "register_mechanism",
    "register_with_transformers",
    "run_in_strips",
    "swap_attention",
    "train",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from linvit import models
    from linvit.bundled import list_recipes
    from linvit.explorer import explore
    from linvit.fusion import fast, fuse
    from linvit.layers.mechanisms import list_mechanisms
    from linvit.models import linearize, register_mechanism, register_with_transformers, swap_attention
    from linvit.released import load_released
    from linvit.runs import Run, export, load_run, new_recipe, train
    from linvit.streaming import run_in_strips

if find_spec("timm") and "linvit_cli" not in sys.modules:  # the command line imports what a command needs
    import_module("linvit.models")
    if "transformers" in sys.modules:
        with suppress(ImportError):  # it is older than 5
            import_module("linvit.models.hugging_face").register_with_transformers()

ON_DEMAND = {
    "Run": "runs",
    "explore": "explorer",
    "export": "runs",
    "fast": "fusion",
    "fuse": "fusion",
    "linearize": "models",
    "list_mechanisms": "layers.mechanisms",
    "list_recipes": "bundled",
    "load_released": "released",
    "load_run": "runs",
    "new_recipe": "runs",
    "register_mechanism": "models",
    "register_with_transformers": "models",
    "run_in_strips": "streaming",
    "swap_attention": "models",
    "train": "runs",
}


def __getattr__(name: str) -> Any:
    """What is public is imported when it is asked for: Lightning and what else training needs take seconds."""
    if name == "models":
        return import_module("linvit.models")
    if name not in ON_DEMAND:
        raise AttributeError(f"module 'linvit' has no attribute {name!r}")
    return getattr(import_module(f"linvit.{ON_DEMAND[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ON_DEMAND})

"""Loads modules that need only the standard library without `import linvit`, which takes seconds."""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def light_module(name: str) -> ModuleType:
    """The module of that name, such as linvit.models.listed; its parent packages are not imported."""
    if "linvit" in sys.modules:
        return import_module(name)
    package = find_spec("linvit")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], *name.split(".")[1:]).with_suffix(".py")
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

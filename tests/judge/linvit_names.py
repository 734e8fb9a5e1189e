"""A pytest plugin that narrows timm's own tests/test_models.py to the models that linvit registers.

timm's tests ask `timm.list_models` for their names while pytest collects them; the plugin answers with ours. What needs
downloaded weights or names a model of timm's own is deselected, and so is TorchScript. Nothing of timm is edited.
"""

import functools
import inspect
from collections.abc import Callable
from fnmatch import fnmatch

import pytest
import timm

from evidence.counts import model_names

# torch has deprecated TorchScript; torch.export is what we support
LEFT_OUT = ("test_model_forward_torchscript", "test_model_forward_fx_torchscript")
NAMES = pytest.StashKey[set[str]]()


def chosen(patterns: list[str]) -> set[str]:
    """The names that linvit registers, all of them or those that fit one of the patterns."""
    return {name for name in model_names() if not patterns or any(fnmatch(name, pattern) for pattern in patterns)}


def narrowed(list_names: Callable[..., list[str]], names: set[str]) -> Callable[..., list[str]]:
    """list_names, but of names alone; timm's modules as a filter would leave out every other package."""
    signature = inspect.signature(list_names)

    @functools.wraps(list_names)
    def listing(*args, **kwargs) -> list[str]:
        arguments = signature.bind(*args, **kwargs).arguments
        if "module" in signature.parameters:
            arguments["module"] = ""
        return [name for name in list_names(**arguments) if name.split(".")[0] in names]

    return listing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--names", action="append", default=[], help="fnmatch pattern of the models; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    names = chosen(config.getoption("names"))
    if not names:
        raise pytest.UsageError(f"linvit registers no model that fits {config.getoption('names')}: see `linvit models`")
    config.stash[NAMES] = names
    timm.list_models = narrowed(timm.list_models, names)
    timm.list_pretrained = narrowed(timm.list_pretrained, names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, dropped, judged = [], [], set()
    for item in items:
        name = str(item.callspec.params.get("model_name", "")).split(".")[0] if hasattr(item, "callspec") else ""
        ours = name in config.stash[NAMES] and "pretrained" not in item.originalname
        ours = ours and item.originalname not in LEFT_OUT
        (kept if ours else dropped).append(item)
        judged |= {name} if ours else set()
    if unjudged := config.stash[NAMES] - judged:
        raise pytest.UsageError(f"timm's suite has no test for {', '.join(sorted(unjudged))}")
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept

"""Helpers that every family shares: patterns, registration with timm, released checkpoints."""

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import clean_state_dict, register_model
from torch import nn

from linvit.errors import SettingError

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
WEIGHTS = Path(__file__).with_name("weights")
"""The folder of the weights that come with linvit, and of their model cards."""
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def stage_mechanisms(pattern: str, letters: Mapping[str, str]) -> tuple[str, ...]:
    """The name of the mechanism of each stage.

    Args:
        pattern: one letter per stage, such as "LLSS".
        letters: the mechanism for each letter.
    """
    if len(pattern) != 4 or not set(pattern) <= set(letters):
        known = ", ".join(f"{letter} = {mechanism}" for letter, mechanism in letters.items())
        raise SettingError(f"`pattern` is {pattern!r}, expected four letters out of ({known}), one per stage")
    return tuple(letters[letter] for letter in pattern)


def register(create: Callable[..., nn.Module], names: Iterable[str], module: str) -> None:
    """Register create(name, pretrained, **arguments) with timm under each name, as a function of that module."""
    for name in names:
        entrypoint = _entrypoint(create, name, module)
        setattr(sys.modules[module], name, entrypoint)
        register_model(entrypoint)


def _entrypoint(create: Callable[..., nn.Module], name: str, module: str) -> Callable[..., nn.Module]:
    def create_named(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(name, pretrained, **kwargs)

    create_named.__name__ = create_named.__qualname__ = name
    create_named.__module__ = module
    create_named.__doc__ = f"{name}: see the tables of {module}."
    return create_named


def imagenet_cfg(**kwargs: Any) -> dict[str, Any]:
    """A pretrained_cfg for ImageNet; it names no licence, since the released weights have none."""
    return dict(
        {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "stem.0",
            "classifier": "head.fc",
        },
        **kwargs,
    )


def nano_cfgs(name: str, **kwargs: Any) -> dict[str, Any]:
    """The pretrained_cfgs of a nano network: its weights in WEIGHTS, which only the tag asks for, and none without it.

    The recipes in recipes/weights trained them, with this preprocessing.
    """
    size = imagenet_cfg(input_size=(3, 32, 32), pool_size=(1, 1), **kwargs)
    cifar10 = {
        "file": str(WEIGHTS / f"{name}.cifar10.safetensors"),
        "num_classes": len(CIFAR10),
        "label_names": CIFAR10,
        "crop_pct": 1.0,
        "mean": (0.4914, 0.4822, 0.4465),
        "std": (0.2470, 0.2435, 0.2616),
        "license": "apache-2.0",
    }
    # timm takes the last one marked * as the default
    return {f"{name}.cifar10": size | cifar10, f"{name}.untrained*": size}


def unwrapped(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint, without the dictionary around them and without `module.` before each key.

    If the checkpoint has several sets, the first of WRAPPERS is used: averaged weights before raw ones, as in timm.
    """
    for name in WRAPPERS:
        if isinstance(checkpoint.get(name), Mapping):
            checkpoint = checkpoint[name]
            break
    return clean_state_dict(dict(checkpoint))


class PatternWarning(UserWarning):
    """Released weights enter a network with other mechanisms."""


def warn_of_pattern(model: nn.Module, released: str) -> None:
    """Warns if released weights enter a network with other mechanisms: keys and shapes fit, the function differs."""
    if model.pattern != released:
        warnings.warn(
            f"The released weights belong to pattern {released}, the model has {model.pattern}: "
            f"published accuracies do not apply, use the weights as an initialization.",
            PatternWarning,
            stacklevel=3,
        )


def renamed(key: str, rules: Iterable[tuple[str, str]]) -> str:
    """The key after all rules (pattern, replacement), applied in order."""
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key

"""Loading the authors' published weights, and writing weights as safetensors."""

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models import create_model
from torch import Tensor, nn

from linvit.arguments import kind
from linvit.errors import SettingError
from linvit.files import read_checkpoint, replacing, user_path
from linvit.models.by_name import check_model
from linvit.models.family import PatternWarning
from linvit.models.pretrained import require_fit


def load_released(
    model: nn.Module, source: str | Path | Mapping[str, Any], *, other_pattern: bool = False
) -> nn.Module:
    """Copy published weights into a network of ours, all of them or none.

    The weights may be the whole checkpoint or its entry `state_dict_ema`, `model_ema`, `state_dict` or `model` (the
    first that exists is taken: averaged weights before raw ones), with or without `module.` before each key, in the
    authors' key names or in ours. Files are read without executing code. Only batch norm counters may be missing.
    Keys and shapes are compared, and the pattern where the keys are the authors'. A network with another `attention`
    but the same shapes takes the weights without a warning, although the published accuracies do not apply to it.

    Args:
        model: a network of one of our families.
        source: path of a .pth or .safetensors file, or a state dict.
        other_pattern: accept the weights of a network with another pattern, to start a training from them; only warn.

    Returns:
        The model.

    Raises:
        FileNotFoundError: if there is no such file.
        TypeError: if the source is neither a path nor a state dict.
        ValueError: if the file cannot be read or would execute code, if a key is missing, unexpected or misshapen (the
            message lists them all, and the model is unchanged), or if the checkpoint has other rotary angles than ours
            or belongs to another pattern.
    """
    translate: Callable[[Any], dict[str, Any]] | None = getattr(model, "native_state_dict", None)
    if translate is None:
        raise SettingError(f"`model` is {kind(model)}, expected a network of linvit: create it by name")
    if not isinstance(source, str | PathLike | Mapping):
        raise TypeError(f"`source` is {kind(source)}, expected a path or a state dict: change it")
    content = source if isinstance(source, Mapping) else read_checkpoint(source)
    with warnings.catch_warnings(record=not other_pattern) as caught:
        weights = translate(content)
    require_fit(weights, model, "load_released")
    refused = [str(warning.message) for warning in caught or () if warning.category is PatternWarning]
    if refused:
        raise SettingError(
            f"{refused[0].partition(':')[0]}: create the model with that pattern, or set `other_pattern=True`"
            " to start a training from them."
        )
    model.load_state_dict({**model.state_dict(), **weights})
    return model


def convert(source: str | Path | Mapping[str, Any], target: str | Path, model_name: str, *, half: bool = False) -> Path:
    """Rewrite published weights as a safetensors file in our key names.

    `timm.create_model(model_name, checkpoint_path=target)` reads it. The file is written completely or not at all.

    Args:
        source: see load_released.
        target: path of the new file, ending in .safetensors; an existing file is replaced.
        model_name: the registered model that the weights belong to.
        half: round the weights to float16.

    Returns:
        The target's path.

    Raises:
        FileNotFoundError, ValueError: see load_released; also for another ending, a missing folder or an unknown model.
    """
    check_model(model_name)
    target = check_target(target)
    weights = load_released(create_model(model_name), source).state_dict()
    write_weights(rounded(weights) if half else weights, target)
    return target


def check_target(target: str | Path) -> Path:
    """The expanded path of a new file; raises ValueError for a wrong ending, FileNotFoundError without its folder."""
    target = user_path(target)
    if target.suffix != ".safetensors":
        raise ValueError(f"convert: the target is {target}, expected a name ending in .safetensors: rename it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"convert: the folder {target.parent} does not exist: create it first")
    return target


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float16, counters unchanged; raises ValueError for a weight too large for it."""
    halves = {key: value.half() if value.is_floating_point() else value for key, value in weights.items()}
    for key, value in halves.items():
        if not torch.isfinite(value).all():
            raise SettingError(f"convert: the weights {key} are not finite in float16: leave `half` out")
    return halves


def write_weights(weights: Mapping[str, Tensor], target: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes weights to a .safetensors file, completely or not at all; metadata: further entries of its header."""
    with replacing(target) as temporary:
        content = {key: value.cpu().contiguous() for key, value in weights.items()}
        save_file(content, temporary, metadata={"format": "pt", **(metadata or {})})

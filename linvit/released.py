"""The authors' published weights: loaded key for key, and rewritten as safetensors."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from timm.models import create_model
from torch import nn

from linvit.files import read_checkpoint, replacing
from linvit.models.pretrained import require_fit


def load_released(model: nn.Module, source: str | Path | Mapping) -> nn.Module:
    """Copy published weights into a network of ours, all of them or none.

    The weights may stand alone or under `state_dict_ema`, `model_ema`, `state_dict` or `model` (the first of these that
    is there wins: averaged weights before raw ones), with or without `module.` before each key, in the authors' key
    names or in ours. Files are read without executing code. Counters of batch norms may be absent, nothing else. Keys
    and shapes are compared, not what is computed: a network made with another `attention` takes the weights where its
    shapes are the same, without a warning, and published accuracies do not apply to it.

    Args:
        model: a network of one of our families.
        source: path of a .pth or .safetensors file, or a state dict.

    Returns:
        The model.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read or would execute code, if a key is missing, unexpected or misshapen (one
            error lists them all and the model is left as it was), or if the checkpoint's rotary angles are not ours.
    """
    name = type(model).__name__
    if not hasattr(model, "native_state_dict"):
        raise ValueError(f"load_released: the model is a {name}, expected one that linvit registers: create it by name")
    checkpoint = source if isinstance(source, Mapping) else read_checkpoint(source)
    weights = model.native_state_dict(checkpoint)
    require_fit(weights, model, "load_released")
    model.load_state_dict({**model.state_dict(), **weights})
    return model


def convert(source: str | Path | Mapping, target: str | Path, model_name: str) -> Path:
    """Rewrite published weights as a safetensors file in our key names.

    `timm.create_model(model_name, checkpoint_path=target)` reads it. The file appears whole or not at all.

    Args:
        source: see load_released.
        target: path of the new file, ending in .safetensors; a file of that name is replaced.
        model_name: the registered model that the weights belong to.

    Returns:
        The target's path.

    Raises:
        FileNotFoundError, ValueError: see load_released; also for another ending or a missing folder.
    """
    target = Path(target)
    if target.suffix != ".safetensors":
        raise ValueError(f"convert: the target is {target}, expected a name ending in .safetensors: rename it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"convert: the folder {target.parent} does not exist: create it first")
    weights = load_released(create_model(model_name), source).state_dict()
    with replacing(target) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary, metadata={"format": "pt"})
    return target

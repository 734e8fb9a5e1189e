"""Weights to start from: those of a run, of a checkpoint, or the released ones, for other classes or another size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.models import clean_state_dict
from torch import Tensor, nn

from linvit.files import read_checkpoint
from linvit.tasks.checkpoints import BEST

PARTS = ("ema.module.", "network.")


def initialize(network: nn.Module, source: str | Path, same_classes: bool = False) -> str:
    """Copies the weights of source into network, without the classifier where its classes differ; says so in one line.

    Args:
        network: Any network; the size of its images may be another than that which the weights were trained with.
        source: A run's folder (its best checkpoint), a checkpoint of a run (the moving average where it has one), or a
            .pth or .safetensors file of weights, the authors' included.

        same_classes: Refuses a classifier of other classes instead of leaving it out.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or does not fit beside the classifier; the network stays as it was.
    """
    path = Path(source)
    path = path / "checkpoints" / BEST if path.is_dir() else path
    weights = _weights(network, read_checkpoint(path))
    own = network.state_dict()
    left_out = [
        key
        for key in _classifier_keys(network)
        if not same_classes and key in weights and key in own and weights[key].shape != own[key].shape
    ]
    taken = {key: value for key, value in weights.items() if key not in left_out}
    faults = [key for key, value in own.items() if key not in left_out and _misfits(key, value, taken)]
    faults += [key for key in taken if key not in own]
    if faults:
        raise ValueError(
            f"The weights in {path} do not fit this {type(network).__name__} in {len(faults)} keys, {faults[0]} for"
            " example: give the weights of the same model."
        )
    network.load_state_dict({**own, **taken})
    if not left_out:
        return f"Starting from {path}, classifier included."
    before, after = len(weights[left_out[0]]), len(own[left_out[0]])
    return f"Starting from {path} without its classifier, which has {before} classes and not {after}."


def _weights(network: nn.Module, content: dict[str, Any]) -> dict[str, Tensor]:
    if "linvit" in content:
        held = content["state_dict"]
        part = next(part for part in PARTS if any(key.startswith(part) for key in held))
        return {key.removeprefix(part): value for key, value in held.items() if key.startswith(part)}
    if hasattr(network, "native_state_dict"):
        return network.native_state_dict(content)
    held = next((content[name] for name in ("state_dict", "model") if isinstance(content.get(name), Mapping)), content)
    return dict(clean_state_dict(held))


def _classifier_keys(network: nn.Module) -> list[str]:
    names = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return [f"{name}.{part}" for name in ([names] if isinstance(names, str) else names) for part in ("weight", "bias")]


def _misfits(key: str, own: Tensor, weights: Mapping[str, Tensor]) -> bool:
    if key not in weights:
        return not key.endswith(".num_batches_tracked")
    return weights[key].shape != own.shape

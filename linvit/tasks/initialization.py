"""Initial weights from a run, a checkpoint or released weights, also for other classes or another image size."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models import clean_state_dict
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.files import read_checkpoint, weights_file
from linvit.layers.operator import AttentionLayer

PREFIXES = ("ema.module.", "network.")
FAMILIES = {f"linvit.models.{name}" for name in ("ravlt", "mavit", "care")}
"""Modules whose networks can have the same names and shapes of weights."""
ALL, ATTENTION, FEED_FORWARD, NOTHING = "all", "attention", "feed_forward", "nothing"
COPIED = (ALL, ATTENTION, FEED_FORWARD, NOTHING)


def initialize(network: nn.Module, source: str | Path, same_classes: bool | None = None, copied: str = ALL) -> str:
    """Copies weights from source into network, except layers for other classes; returns a line that describes it.

    A linearized network (with an `origin`) also starts from the weights of the network that it was made from.

    Args:
        network: Any network; its image size may differ from that of training. A detector or segmentor accepts
            complete weights, or those of its backbone alone, such as a classifier's.
        source: A run's folder (its best checkpoint), a checkpoint of a run (the moving average if it has one), or a
            .pth or .safetensors file of weights, the authors' included.
        same_classes: True refuses a classifier for another number of classes, False leaves every classifier out; None
            leaves out one for another number.
        copied: Which weights a linearized network gets: "all", "attention" (those of all attention layers: projections,
            norms and gates), "feed_forward" (all others) or "nothing". The rest keep their initial values.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or does not fit apart from the classifier; the network stays as it was.
    """
    path = weights_file(source)
    content = read_checkpoint(path)
    _check_same_family(network, content, path)
    weights = _weights(network, content, path)
    target = network.state_dict()
    weights = _resampled(network, target, weights)
    origin: Any = getattr(network, "origin", None)
    if origin is None and copied != ALL:
        raise SettingError(
            f"`copied` is {copied!r}, but {type(network).__name__} was not made by linearizing another network: set it"
            f" to {ALL!r}."
        )
    if origin is not None and _are_of_its_teacher(network, content, weights, path):
        teacher = origin.teacher()
        line = initialize(teacher, source, same_classes)
        copy_weights(network, origin.student(teacher).state_dict(), copied)
        return line
    left_out = [] if same_classes else _left_out(network, target, weights, same_classes is None)
    fitting = {key: value for key, value in weights.items() if key not in left_out}
    faults = [key for key, value in target.items() if key not in left_out and _misfits(key, value, fitting)]
    faults += [key for key in fitting if key not in target]
    if faults:
        fit = sum(key in weights and weights[key].shape == value.shape for key, value in target.items())
        classes = ", for as many classes" if faults[0] in _classifier_keys(network) else ""
        raise ValueError(
            f"The weights in {path} do not fit this {type(network).__name__}: only {fit} of its {len(target)} tensors"
            f" are there with the same shape, and {faults[0]} is not: give weights of the same model{classes}."
        )
    copy_weights(network, fitting, copied)
    return f"Starting from {path}{_beside(network, target, weights, left_out)}."


def _resampled(network: Any, target: Mapping[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the position table of a ViT interpolated for the network's number of patches."""
    key = "pos_embed"
    before, after = weights.get(key), target.get(key)
    embedding = getattr(network, "patch_embed", None)
    if before is None or after is None or before.shape == after.shape or before.shape[::2] != after.shape[::2]:
        return weights
    if before.ndim != 3 or not isinstance(embedding, PatchEmbed) or embedding.grid_size is None:
        return weights
    prefix = after.shape[1] - embedding.grid_size[0] * embedding.grid_size[1]
    if before.shape[1] - prefix != math.isqrt(before.shape[1] - prefix) ** 2:
        return weights
    table = resample_abs_pos_embed(before, list(embedding.grid_size), num_prefix_tokens=prefix)
    return {**weights, key: table}


def copy_weights(network: nn.Module, weights: Mapping[str, Tensor], copied: str = ALL) -> None:
    """Copies tensors by name into the network, of all that are given those that `copied` chooses, see `initialize`."""
    chosen = {key: value for key, value in weights.items() if copied in (ALL, _kind(network, key))}
    network.load_state_dict({**network.state_dict(), **chosen})


def _are_of_its_teacher(
    network: nn.Module, content: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path
) -> bool:
    """Whether weights are those of the network that a linearized one was made from, not of itself.

    Raises ValueError if their names fit both, although one orders the channels of its heads differently.
    """
    recorded = _recorded_model(content)
    if recorded is not None:
        return recorded.get("name") != network.pretrained_cfg["architecture"]  # type: ignore[index]
    needed = {key for key in network.state_dict() if not key.endswith(".num_batches_tracked")}
    missing = needed - weights.keys() - set(_classifier_keys(network))
    if not missing and any(getattr(module, "half_table", False) for module in network.modules()):
        raise ValueError(
            f"The names of the weights in {path} fit both the softmax network and the linear one, whose channels have"
            " another order: give a run, which says whose they are."
        )
    return bool(missing)


def _kind(network: nn.Module, key: str) -> str:
    """Whether a tensor belongs to attention or to anything else."""
    names = key.split(".")[:-1]
    layers = [network.get_submodule(".".join(names[: depth + 1])) for depth in range(len(names))]
    ours = any(isinstance(layer, AttentionLayer) for layer in layers)
    timms = any(type(layer).__name__.endswith(("Attention", "AttentionRope")) for layer in layers)
    return ATTENTION if ours or timms else FEED_FORWARD


def _weights(network: nn.Module, content: dict[str, Any], path: Path) -> dict[str, Tensor]:
    if "linvit" in content:
        held = _tensors(content.get("state_dict"), path)
        prefix = next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in held)), PREFIXES[-1])
        content = {key.removeprefix(prefix): value for key, value in held.items() if key.startswith(prefix)}
        if not hasattr(network, "backbone_prefix"):
            return content
    native = getattr(network, "native_state_dict", None)
    if callable(native):
        return _tensors(native(content), path)
    held = next((content[name] for name in ("state_dict", "model") if isinstance(content.get(name), Mapping)), content)
    return _tensors(clean_state_dict(dict(held)), path)


def _tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    """Returns the weights; raises ValueError unless there are some, all of them finite tensors."""
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"{path} contains no weights to start from: give a run or a weight file.")
    for key, value in weights.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} contains {str(key)[:60]!r}, a {type(value).__name__}, not a tensor: give a file of weights."
            )
        if key.startswith("train_loss."):
            continue
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"The weights {key} in {path} are not finite: start from a run that did not diverge.")
    return dict(weights)


def _check_same_family(network: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the checkpoint records a model of another family or mechanism than the network.

    Names and shapes of the weights can be the same in both, as those of ravlt_nano and mavit_nano are.
    """
    recorded = _recorded_model(content)
    if recorded is None:
        return
    name, mechanism = str(recorded.get("name") or recorded.get("backbone")), getattr(network, "mechanism", None)
    family = timm.model_entrypoint(name).__module__ if timm.is_model(name) else None
    families = {type(module).__module__ for module in network.modules()} & FAMILIES
    if family in FAMILIES and families and family not in families:
        this = f"of the family {families.pop().rpartition('.')[2]}"
    elif recorded.get("mechanism") and mechanism and recorded["mechanism"] != mechanism:
        name, this = f"{name} with {recorded['mechanism']} attention", f"with {mechanism} attention"
    else:
        return
    raise ValueError(
        f"The weights in {path} belong to {name}, but this is a network {this}, which interprets them differently:"
        " give weights of the same model."
    )


def _recorded_model(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The group `model` of the recipe in a checkpoint of a run."""
    recorded: Any = content
    for key in ("linvit", "recipe", "model"):
        recorded = recorded.get(key) if isinstance(recorded, Mapping) else None
    return recorded if isinstance(recorded, Mapping) else None


def _left_out(network: nn.Module, target: Mapping[str, Tensor], weights: Mapping[str, Tensor], keep: bool) -> list[str]:
    """Keys that keep their initial values: layers for other classes, and heads that the weights do not contain.

    keep: whether a classifier for as many classes is one for the same classes.
    """
    if not hasattr(network, "backbone_prefix"):
        shared = [key for key in _classifier_keys(network) if key in target]
        return [key for key in shared if not keep or key not in weights or weights[key].shape != target[key].shape]
    heads = [key for key in target if not key.startswith(str(network.backbone_prefix))]
    pairs = {key: (target[key].shape, weights[key].shape) for key in heads if key in weights}
    # class layers differ only in the number of outputs
    return [key for key, (a, b) in pairs.items() if a and a != b and a[1:] == b[1:]] if pairs else heads


def _beside(
    network: nn.Module, target: Mapping[str, Tensor], weights: Mapping[str, Tensor], left_out: Sequence[str]
) -> str:
    """The end of the line that says what was copied."""
    if not left_out:
        return ", heads included" if hasattr(network, "backbone_prefix") else ", classifier included"
    if left_out[0] not in weights:
        kept = "neck and heads keep their" if hasattr(network, "backbone_prefix") else "the classifier keeps its"
        return f": its backbone; {kept} initial weights"
    if hasattr(network, "backbone_prefix"):
        return f" without the layers for other classes, such as {left_out[0]}"
    before, after = len(weights[left_out[0]]), len(target[left_out[0]])
    others = "is for other classes" if before == after else f"has {before} classes instead of {after}"
    return f" without its classifier, which {others}"


def _classifier_keys(network: nn.Module) -> list[str]:
    names = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return [f"{name}.{kind}" for name in ([names] if isinstance(names, str) else names) for kind in ("weight", "bias")]


def _misfits(key: str, target: Tensor, weights: Mapping[str, Tensor]) -> bool:
    if key not in weights:
        return not key.endswith(".num_batches_tracked")
    return weights[key].shape != target.shape

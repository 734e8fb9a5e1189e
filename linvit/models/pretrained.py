"""Building a registered variant through timm, with weights of its own or the authors' published ones if asked for."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from timm.models import build_model_with_cfg, list_pretrained, resolve_pretrained_cfg
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.ranges import Some, check

FEATURES = {"features_only": bool, "out_indices": int | Annotated[Sequence[int], Some()] | None, "pretrained": bool}
"""Arguments of timm's builder that are checked here."""
FOUR_STAGES = {"out_indices": (0, 1, 2, 3), "flatten_sequential": True}


def create(
    model_cls: Callable[..., nn.Module],
    variant: str,
    pretrained: bool,
    feature_cfg: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A variant with timm's adaptation of channels and classes and with features_only.

    timm finds the weights: those that come with linvit in the package, others on a hub, from where they are downloaded
    once into its cache. No checksums are known: keys and shapes must fit exactly, except for the first convolution and
    the classifier if the model has other channels or classes. Weights in half precision become float32.

    Args:
        model_cls, variant: the family and the registered name.
        pretrained: whether to load weights.
        feature_cfg: timm's settings for features_only; by default four consecutive stages.
        kwargs: arguments of the family and of timm's builder.

    Raises:
        RuntimeError: if there are no weights, or if they cannot be downloaded.
        ValueError: if the weights are missing, damaged or do not fit (the message lists every key), and for arguments
            that do not fit together.
    """
    check(FEATURES, {**kwargs, "pretrained": pretrained})
    overlay = kwargs.get("pretrained_cfg_overlay")
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay).to_dict() if pretrained else {}
    if pretrained:
        _check_weights(variant, cfg)
    headless = kwargs.get("features_only", False)

    def fitting(checkpoint: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        translate: Callable[[Any], dict[str, Any]] = getattr(model, "native_state_dict", dict)
        weights = translate(checkpoint)
        require_fit(weights, model, "pretrained", _adapted(model, cfg, headless))
        # timm would round the first convolution again when it adapts it to other channels
        return {key: value.float() if value.dtype == torch.float16 else value for key, value in weights.items()}

    with _explained(variant, cfg, kwargs), _without_retries() if cfg.get("hf_hub_id") else nullcontext():
        model: nn.Module = build_model_with_cfg(
            model_cls,
            variant,
            pretrained,
            pretrained_filter_fn=fitting,
            feature_cfg=dict(FOUR_STAGES if feature_cfg is None else feature_cfg),
            **kwargs,
        )
    info: Any = model.feature_info if headless else None
    taken = [index % len(info.info) for index in info.out_indices] if info else [0]
    if taken != sorted(set(taken)) or not taken:
        raise SettingError(
            f"`out_indices` is {kwargs['out_indices']}, expected a number above 0, or different indices in ascending"
            " order: the maps always come in the order of the network."
        )
    return model


@contextmanager
def _explained(variant: str, cfg: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Raises what timm's builder and the hub's client raise as sentences that name the variant."""
    try:
        yield
    except (AssertionError, IndexError) as error:  # raised by timm for wrong arguments
        if arguments.get("out_indices") is not None:
            raise SettingError(
                f"`out_indices` is {arguments['out_indices']}, but {variant} has fewer maps: choose others, such as"
                " (-2, -1)."
            ) from error
        raise ValueError(
            f"timm cannot build {variant} from its arguments {', '.join(arguments)} ({error}): correct them"
        ) from error
    except (SafetensorError, OSError) as error:  # the latter is the base of all errors of the hub's client
        if cfg.get("file"):
            raise ValueError(
                f"{variant}: the weights {cfg['file']} are missing or damaged: use another copy."
            ) from error
        file = cfg.get("hf_hub_filename")
        if cfg.get("state_dict") or not file:
            raise
        raise RuntimeError(
            f"{variant}: {file} could not be downloaded from {cfg['hf_hub_id']} on the Hugging Face hub "
            f"({type(error).__name__}): download https://huggingface.co/{cfg['hf_hub_id']}/resolve/main/{file}, "
            f"then either linvit.load_released(model, {file!r}), or `linvit convert` it to weights.safetensors and set "
            "checkpoint_path='weights.safetensors'"
        ) from error


@contextmanager
def _without_retries() -> Iterator[None]:
    """Uses the hub's cache alone where its address cannot be found, instead of six tries in half a minute."""
    before = constants.HF_HUB_OFFLINE
    if not getproxies():  # a proxy finds it itself
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_weights(variant: str, cfg: Mapping[str, Any]) -> None:
    if any(cfg.get(key) for key in ("file", "state_dict", "url", "hf_hub_id")):
        return
    if tagged := list_pretrained(f"{variant}.*"):
        raise RuntimeError(f"{variant} has weights under another name: create {' or '.join(tagged)}.")
    advice = "and load a file of the authors with linvit.load_released(model, path)"
    if not variant.startswith("care_"):
        advice = "and train it, or linearize a trained network with linvit.linearize"
    raise RuntimeError(f"{variant} has no published weights on a hub: create it with pretrained=False, {advice}")


def require_fit(weights: Mapping[str, Any], model: nn.Module, caller: str, adapted: tuple[str, ...] = ()) -> None:
    """Refuse weights whose keys or shapes differ from the model's; only batch norm counters may be missing.

    Args:
        weights: in the key names of the model.
        model: it is not changed.
        caller: the first word of the error.
        adapted: modules whose weights may be missing or have another shape.

    Raises:
        ValueError: lists every key that is missing, unexpected or misshapen.
    """
    expected: dict[str, Tensor] = model.state_dict()
    faults = {}
    for key, value in expected.items():
        if key not in weights and not key.endswith(".num_batches_tracked"):
            faults[key] = f"missing {key} {_shape(value)}"
    for key, value in weights.items():
        if key not in expected:
            faults[key] = f"unexpected {key} {_shape(value)}"
        elif _shape(value) != _shape(expected[key]):
            faults[key] = f"misshapen {key}: checkpoint {_shape(value)}, model {_shape(expected[key])}"
    shown = [fault for key, fault in faults.items() if not key.startswith(tuple(f"{name}." for name in adapted))]
    if shown:
        raise ValueError(
            f"{caller}: the checkpoint does not fit this {type(model).__name__} in {len(shown)} keys "
            "(the model is unchanged); create the model that it belongs to:\n  " + "\n  ".join(shown)
        )


def _adapted(model: nn.Module, cfg: Mapping[str, Any], headless: bool) -> tuple[str, ...]:
    """The modules that timm adapts: the model has other channels or classes than the weights, or no head."""
    names: list[str] = []
    if model.in_chans != cfg["input_size"][0]:
        names += _names(cfg.get("first_conv"))
    if headless or model.num_classes != cfg["num_classes"]:
        names += _names(cfg.get("classifier"))
    return tuple(names)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"

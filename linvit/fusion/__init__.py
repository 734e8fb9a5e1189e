"""Exact folding for inference: the same outputs from fewer passes over memory."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.arguments import check_dense, check_network
from linvit.errors import refuse
from linvit.fusion import care, cuda, graph, pyramid, timm_layers
from linvit.fusion.folds import Folds
from linvit.kernels import cpu
from linvit.ranges import lookup

EAGER: Folds = {**timm_layers.FOLDS, **pyramid.FOLDS, **care.FOLDS}
FORMS: dict[str, Folds] = {"eager": EAGER, "graph": EAGER | graph.FOLDS}
DIFFERENCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
DEVICES: dict[str, Folds] = {"cpu": {}, "cuda": cuda.FOLDS}


def fuse(model: nn.Module, form: str = "eager", *, for_device: str = "cpu") -> nn.Module:
    """A copy of the model for inference, with the same outputs from fewer and larger steps; see Fusing for inference.

    Batch norms, layer scales, the weights of layer norms, residual depthwise convolutions, CARE's parallel convolutions
    and its two heads go into their neighbours; maps are channels last. It folds all models of this package, also as
    `features_only` or inside a detector or segmentor; timm's ViT, Swin and PVT v2 blocks, swapped or not; and in every
    other model, convolutions followed directly by a batch norm in an nn.Sequential or in timm's ConvNormAct. Layers
    whose folding may be inexact stay as they are, such as those of other classes (quantized, adapted, reparametrized).

    Args:
        model: in eval mode; it is not changed. Fuse in float32 or wider, and cast to bfloat16 afterwards.
        form: "eager" for torch; "graph" for files of other runtimes, with maps that are never transposed.
        for_device: "cuda" for GPUs, where a linear layer or convolution of RAVLT, MAViT and CARE is one launch with the
            norm before it and the activation and sums after it, if `linvit check-gpu` has found that kernel exact. The
            outputs are the same on every device.

    Returns:
        A model of the same class with the same inputs, without gradients for its weights. It can be fused
        again, copied, pickled, exported, compiled and cast. Its state dict has other names and fits other fused
        copies of the same architecture. It stays in eval mode: `.train()` is a ValueError.

    Raises ValueError if the model, or a module in it, is in train mode, for an unknown form or device, and for the form
    "graph" of a GPU.
    """
    check_network("model", model)
    table = lookup("form", form, FORMS) | lookup("for_device", for_device, DEVICES)
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    refuse(
        form == "graph"
        and for_device == "cuda"
        and "`form` 'graph' is for files of other runtimes, and `for_device` 'cuda' for torch: choose one",
        training
        and f"`model` cannot be fused: {training[0]} is in train mode, where batch statistics and drop paths cannot be "
        "folded, expected eval mode: call model.eval() first",
    )
    with torch.no_grad():
        fused = _folded(deepcopy(model), table, {}).eval().requires_grad_(False)
    setattr(fused, "train", partial(_stay_in_eval_mode, fused))  # noqa: B010 - mypy lets no method be replaced otherwise
    return fused


def fast(model: nn.Module, example: Tensor, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """A function that computes the model's output as fast as this device can, for many inputs of the example's size.

    The model is fused, with maps channels last. On a GPU it is compiled for this size, with all launches of a call as
    one CUDA graph, which takes minutes the first time; a call with another size compiles again. On a CPU the C++ kernel
    is built, where there is a compiler, and nothing is compiled by torch.

    Args:
        model: an image network in eval mode, on the device of the example; it is not changed.
        example: images (batch, channels, height, width), floating point.
        dtype: of weights and maps, such as torch.bfloat16 on a GPU; None for the model's.

    Returns:
        From images to the output of the model, in its own memory and in `dtype`.

    Raises:
        ValueError: as `fuse`, and if the output for the example differs from the model's by more than DIFFERENCES of
            its largest value.
    """
    check_dense("example", example)
    is_gpu = example.is_cuda
    with torch.inference_mode():
        expected = model(example)
    fused: Any = fuse(model, for_device="cuda" if is_gpu else "cpu")
    fused = fused.to(dtype=dtype, memory_format=torch.channels_last)
    if is_gpu:
        fused = torch.compile(fused, mode="reduce-overhead", dynamic=False)
    else:
        with suppress(ValueError):  # no compiler
            cpu.build()

    def run(images: Tensor) -> Tensor:
        images = images.to(dtype=dtype or images.dtype, memory_format=torch.channels_last)
        with torch.inference_mode():
            out: Tensor = fused(images)
            return out.clone() if is_gpu else out  # the next call writes into the memory of a graph

    output = run(example)
    largest = expected.double().abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = ((output.double() - expected.double()).abs().max() / largest).item()
    if not difference <= DIFFERENCES[output.dtype]:
        raise ValueError(
            f"the output in {output.dtype} differs from that of the model by {difference:.1e} of its largest value, "
            f"expected at most {DIFFERENCES[output.dtype]:.0e}: use another `dtype`, or the model itself"
        )
    return run


def _folded(module: nn.Module, table: Folds, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module with its submodules and then itself folded; a shared module is folded once."""
    if module not in done:
        for name, child in module.named_children():
            setattr(module, name, _folded(child, table, done))
        fold = table.get(type(module))
        done[module] = module if fold is None else fold(module)
    return done[module]


def _stay_in_eval_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        raise ValueError(
            "a fused model has no train mode, because its norms and drop paths are gone: train the original model "
            "and fuse it again"
        )
    return type(model).train(model, False)

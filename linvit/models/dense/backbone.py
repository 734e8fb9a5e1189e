"""A classification network as the backbone of detectors and segmentors: four maps at strides 4, 8, 16, 32.

The released dense backbones of RAVLT and MAViT have a layer norm on the output of each stage; the next stage reads the
map without the norm. Classification does not train these norms. Everything after the last stage (convolution, batch
norm, classifier) is removed.

CARE's dense code is not released. Here its maps are the outputs of the stages, memory channels included; the last is as
wide as the classifier's input (four times the stage), so that every weight trained by classification is used.

Between backbone and heads is the feature pyramid, `Neck`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, cast

import timm
from timm.layers import LayerNorm2d
from timm.models import FeatureInfo
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool

from linvit.files import explained
from linvit.layers.checks import check_floats
from linvit.models.backbone import Backbone
from linvit.models.by_name import known_arguments
from linvit.models.family import unwrapped
from linvit.models.pyramid import Pyramid
from linvit.ranges import Checked, Filled, lookup

STRIDES = (4, 8, 16, 32)
_FAMILIES = ("linvit.models.care", "linvit.models.mavit", "linvit.models.ravlt")
_DEEPER = ("body.body.", "body.norms.")
_CLASSIFIER = ("proj.", "norm.", "head.", "final_conv.", "dist_head.")
_CLASSIFIER_OF_TIMM = ("fc.", "head.", "classifier.")


class DenseBackbone(Checked, nn.Module):
    """Four maps of any model of ours or any four-stage timm `features_only` model.

    Args:
        name: a model that timm knows.
        kwargs: arguments of timm.create_model: pretrained, pattern, drop_path_rate, device, …

    Attributes:
        body: the network without its classifier.
        norms: four LayerNorm2d (ε 1e-6) on the maps of RAVLT and MAViT, identities for every other model.
        channels: of the four maps.

    Raises ValueError for an unknown model or argument, and a model without maps at strides 4, 8, 16 and 32.
    """

    body: nn.Module

    def __init__(self, name: Annotated[str, Filled()], **kwargs: Any) -> None:
        super().__init__()
        with known_arguments(name, kwargs):
            self.body, maps = _four_maps(name, kwargs)
        self.channels = tuple(int(entry["num_chs"]) for entry in maps)
        strides = tuple(entry["reduction"] for entry in maps)
        if strides != STRIDES:
            raise ValueError(f"{name} has maps at strides {strides}, expected {STRIDES}: choose a four-stage model.")
        first = next(self.body.parameters())
        normed = isinstance(self.body, Pyramid)
        self.norms = nn.ModuleList(
            LayerNorm2d(width, eps=1e-6, device=first.device, dtype=first.dtype) if normed else nn.Identity()
            for width in self.channels
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of keeping their activations."""
        body = self.body if isinstance(self.body, Backbone) else getattr(self.body, "model", self.body)
        cast(Callable[[bool], None], body.set_grad_checkpointing)(enable)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Images (batch, in_chans, height, width) to four maps (batch, channels, height / stride, width / stride)."""
        check_floats("images", x, ("batch", "channels", "height", "width"), "pass a batch of images")
        maps: list[Tensor]
        if isinstance(self.body, Backbone):
            maps = cast(list[Tensor], self.body.forward_intermediates(x, intermediates_only=True))
        else:
            maps = self.body(x)
            if getattr(self.body, "output_fmt", None) == "NHWC":
                maps = [tensor.permute(0, 3, 1, 2) for tensor in maps]
        return [norm(tensor) for norm, tensor in zip(self.norms, maps, strict=True)]

    def native_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint in our key names: a released dense backbone, with or without `backbone.`, or a classifier.

        Of the checkpoint of a detector or segmentor, only the backbone is used. From that of a classifier everything
        after the stages is dropped; the output norms, which it does not have, keep their values.
        """
        weights = unwrapped(state_dict)
        inner = {key.removeprefix("backbone."): value for key, value in weights.items() if key.startswith("backbone.")}
        weights = inner or weights
        # our detectors have the backbone one level deeper, next to the neck
        deeper = {key.removeprefix("body."): value for key, value in weights.items() if key.startswith(_DEEPER)}
        native = {key: value for key, value in (deeper or weights).items() if key.startswith(("body.", "norms."))}
        if native:
            return native
        if not isinstance(self.body, Backbone):
            return {f"body.{key}": value for key, value in weights.items() if not key.startswith(_CLASSIFIER_OF_TIMM)}
        norms, rest = {}, {}
        for key, value in weights.items():
            if key.startswith("extra_norms."):
                norms[key.replace("extra_norms.", "norms.").replace(".norm.", ".")] = value
            else:
                rest[key] = value
        if not norms:
            rest = {key: value for key, value in rest.items() if not key.startswith(_CLASSIFIER)}
            norms = {f"norms.{key}": value for key, value in self.norms.state_dict().items()}
        return {f"body.{key}": value for key, value in self.body.native_state_dict(rest).items()} | norms


def _four_maps(name: str, kwargs: Mapping[str, Any]) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The network without its classifier, made once, and timm's description of its maps."""
    if timm.model_entrypoint(name).__module__ in _FAMILIES:
        backbone = timm.create_model(name, **kwargs)
        assert isinstance(backbone, Backbone)
        backbone.prune_intermediate_layers([0, 1, 2, 3], prune_norm=True)
        return backbone, backbone.feature_info
    with explained(
        lambda reason: f"{name} has no four maps ({reason}): choose a four-stage model.",
        (AssertionError, IndexError, RuntimeError),
    ):
        body = timm.create_model(name, features_only=True, out_indices=(-4, -3, -2, -1), **kwargs)
    info = cast(FeatureInfo, body.feature_info)
    return body, info.get_dicts()


def conv_norm_relu(in_width: int, width: int, kernel_size: int = 3) -> nn.Sequential:
    """Convolution without bias, batch norm, ReLU; Kaiming initialization by the fan-out."""
    unit: nn.Sequential = Conv2dNormActivation(in_width, width, kernel_size)
    nn.init.kaiming_normal_(cast(nn.Conv2d, unit[0]).weight, mode="fan_out", nonlinearity="relu")
    return unit


class ExtraLevels(ExtraFPNBlock):
    """Two more levels by 3×3 convolutions of stride 2 on the backbone's last map, without ReLU in between."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(in_width, width, 3, 2, 1)
        self.p7 = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        p6 = self.p6(x[-1])
        return [*results, p6, self.p7(p6)], [*names, "p6", "p7"]


EXTRA: Mapping[str, Callable[[int, int], nn.Module | None]] = {
    "none": lambda in_width, width: None,
    "pool": lambda in_width, width: LastLevelMaxPool(),
    "convolutions": ExtraLevels,
}


class Neck(FeaturePyramidNetwork):
    """Feature pyramid over a list of maps: nearest upsampling, Xavier initialization.

    Args:
        in_widths: channels of the maps, from fine to coarse.
        width: channels of every level.
        extra: further levels: "none"; "pool", one, every second position of the last; "convolutions", two, from the
            last map.

    Raises ValueError for an unknown extra.
    """

    def __init__(self, in_widths: Sequence[int], width: int = 256, extra: str = "none") -> None:
        super().__init__(list(in_widths), width, lookup("extra", extra, EXTRA)(in_widths[-1], width))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, maps: list[Tensor]) -> OrderedDict[str, Tensor]:
        """Maps (batch, channels, height, width) to levels "0", "1", … and the extra ones, from fine to coarse."""
        return super().forward(OrderedDict((str(i), map_) for i, map_ in enumerate(maps)))

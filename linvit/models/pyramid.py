"""The four-stage body that RAVLT and MAViT share."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from timm.layers import ClassifierHead, calculate_drop_path_rates, get_device_dtype
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from linvit.layers import AttentionBlock, ConvDownsample, ConvStem, rotary_table
from linvit.layers.attention import AXES
from linvit.layers.pointwise import PointwiseConv
from linvit.models.backbone import Backbone, Stage
from linvit.models.family import imagenet_cfg, renamed, stage_mechanisms, unwrapped, warn_of_pattern
from linvit.models.pretrained import create
from linvit.ops import rotary_1d

SIZES = {
    "nano": {
        "widths": (32, 48, 64, 96),
        "depths": (1, 1, 2, 1),
        "heads": (2, 3, 4, 6),
        "final_width": 128,
        "pattern": "LLLL",
    },
    "tiny": {
        "widths": (64, 128, 256, 512),
        "depths": (2, 2, 6, 2),
        "heads": (1, 2, 4, 8),
        "drop_path_rate": 0.1,
    },
    "small": {
        "widths": (64, 128, 320, 512),
        "depths": (3, 5, 9, 3),
        "heads": (1, 2, 5, 8),
        "drop_path_rate": 0.15,
    },
    "base": {
        "widths": (96, 192, 384, 512),
        "depths": (4, 6, 12, 6),
        "heads": (1, 2, 6, 8),
        "layer_scale": (1.0, 1.0, 1e-6, 1e-6),
        "drop_path_rate": 0.4,
    },
    "large": {
        "widths": (96, 192, 448, 640),
        "depths": (4, 7, 19, 8),
        "heads": (1, 2, 7, 10),
        "layer_scale": (1e-6, 1e-6, 1e-6, 1e-6),
        "drop_path_rate": 0.55,
    },
}


class PyramidStage(Stage):
    """A stage whose blocks share one rotary table."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module], head_width: int):
        super().__init__(downsample, blocks)
        self.head_width = head_width

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        return self.through_blocks(x, rotary_table(x, self.head_width))


class Pyramid(Backbone):
    """Stem, four stages at strides 4, 8, 16, 32, a 1×1 convolution with batch norm and SiLU, a linear classifier.

    Args:
        in_chans: channels of the images.
        num_classes: classes, 0 for none.
        global_pool: pooling of the classifier head, "" for none.
        widths, depths, heads: channels, blocks and heads of each stage.
        pattern: one letter a stage, L for the family's linear attention, S for softmax attention.
        attention: keys of Attention2d with other values than the released ones: feature_map, weighting, normalizer
            (heeded in linear stages alone), modulation, lepe, rope.
        cpe: whether every block begins with its 3×3 depthwise convolution.
        ffn_ratio: hidden channels of the feed-forward over width.
        layer_scale: initial layer scale of each stage.
        final_width: channels of the last convolution, the width that the classifier reads.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 over all blocks.

    Raises:
        ValueError: for an unknown pattern or key of attention, and on forward for images under 32 px a side or with
            other channels.
    """

    linear: str
    final_widths: ClassVar[Mapping[str, int]] = {}  # other than the default, by size

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        widths: tuple[int, ...] = (64, 128, 256, 512),
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (1, 2, 4, 8),
        pattern: str = "LLSS",
        attention: dict[str, Any] | None = None,
        cpe: bool = True,
        ffn_ratio: float = 3.5,
        layer_scale: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        final_width: int = 1024,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(in_chans, num_classes, drop_rate, pattern, widths)
        dd = {"device": device, "dtype": dtype}
        mechanisms = stage_mechanisms(pattern, {"L": self.linear, "S": "softmax"})
        unheeded = [key for key in attention or {} if key in AXES]
        if unheeded and "L" not in pattern:
            raise ValueError(
                f"`attention` has {unheeded[0]!r}, but {pattern} has no linear stage: drop it or change `pattern`"
            )
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stem = ConvStem(in_chans, widths[0], **dd)
        self.stages = nn.Sequential()
        for i, width in enumerate(widths):
            downsample = ConvDownsample(widths[i - 1], width, **dd) if i else nn.Identity()
            options = {"attention": attention, "cpe": cpe, "ffn_ratio": ffn_ratio, "layer_scale": layer_scale[i], **dd}
            blocks = [AttentionBlock(width, heads[i], mechanisms[i], drop_path=rate, **options) for rate in rates[i]]
            self.stages.append(PyramidStage(downsample, blocks, width // heads[i]))
        self.final_conv = nn.Sequential()
        self.final_conv.add_module("conv", PointwiseConv(widths[-1], final_width, **dd))
        self.final_conv.add_module("norm", nn.BatchNorm2d(final_width, **dd))
        self.final_conv.add_module("act", nn.SiLU())
        self.num_features = final_width
        self.head = ClassifierHead(final_width, num_classes, pool_type=global_pool, drop_rate=drop_rate, **dd)
        self.head_hidden_size = self.head.num_features
        self.init_weights(needs_reset=False)

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for num_classes (0: none); None keeps the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **get_device_dtype(self))
        self.head_hidden_size = self.head.num_features

    def native_state_dict(self, state_dict: dict) -> dict:
        """The authors' checkpoint in our key names; a state dict that has ours already passes unchanged.

        Wrappers and `module.` are taken off (see family.unwrapped). The released classifier is a 1×1 convolution,
        ours a linear layer. The released RoPE.angle buffers are compared with our formula and left out.

        Raises:
            ValueError: if a RoPE.angle buffer holds other angles than ours.
        """
        state_dict = unwrapped(state_dict)
        if not any(key.startswith(_RELEASED) for key in state_dict):
            return state_dict
        warn_of_pattern(self, "LLSS")
        native = {}
        for key, value in state_dict.items():
            if key.endswith(".RoPE.angle"):
                _compare_angles(key, value, self)
                continue
            key = renamed(key, _RULES)
            native[key] = value.flatten(1) if key == "head.fc.weight" else value
        return native

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The unpooled map to logits, or to what the classifier reads."""
        return self.head(x, pre_logits=pre_logits)


_RELEASED = ("patch_embed.", "layers.")
_RULES = [
    (r"^patch_embed\.proj\.", "stem."),
    *((rf"^layers\.{i}\.downsample\.", f"stages.{i + 1}.downsample.") for i in range(3)),
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks."),
    (r"\.downsample\.reduction\.", ".downsample.conv."),
    (r"\.norm([12])\.norm\.", r".norm\1."),
    (r"\.pos\.", ".cpe."),
    (r"^proj\.", "final_conv.conv."),
    (r"^norm\.", "final_conv.norm."),
    (r"^head\.", "head.fc."),
]


def _compare_angles(key: str, angle: Tensor, model: nn.Module) -> None:
    stage = int(key.split(".")[1])
    if stage >= len(model.stages):
        return
    rotary = rotary_1d(1, model.stages[stage].head_width // 2, start=1, dtype=torch.float64)
    expected = torch.atan2(rotary.sin, rotary.cos)[0].repeat_interleave(2)
    if angle.shape != expected.shape:
        raise ValueError(
            f"{key} has shape {tuple(angle.shape)}, expected {tuple(expected.shape)}: "
            f"create the model with the checkpoint's head widths"
        )
    tolerance = max(1e-5, 8 * torch.finfo(angle.dtype).eps)
    if not torch.allclose(angle.double().cpu(), expected, rtol=tolerance, atol=0):
        raise ValueError(
            f"{key} holds other angles than 10000^-linspace(0, 1, {len(expected) // 2}): "
            f"the checkpoint belongs to another position encoding"
        )


def pyramid_cfgs(family: str) -> dict:
    """timm's configurations of a family: the authors' files on the hub, and ours, without weights."""
    name = family.lower()
    cfgs = {f"{name}_nano.untrained": imagenet_cfg(input_size=(3, 32, 32), pool_size=(1, 1))}
    for size in ("tiny", "small", "base", "large"):
        file = f"{family}_{size[0].upper()}.pth"
        cfgs[f"{name}_{size}.in1k"] = imagenet_cfg(hf_hub_id=f"aldjalkdf/{family}", hf_hub_filename=file)
        cfgs[f"{name}_{size}_linear.untrained"] = imagenet_cfg()
    return generate_default_cfgs(cfgs)


def create_pyramid(network: type[Pyramid], variant: str, pretrained: bool, **kwargs) -> Pyramid:
    """A registered variant of a family; kwargs are other arguments than those of its size."""
    size = variant.split("_")[1]
    arguments = SIZES[size] | ({"final_width": network.final_widths[size]} if size in network.final_widths else {})
    if variant.endswith("_linear"):
        arguments["pattern"] = "LLLL"
    return create(network, variant, pretrained, **{**arguments, **kwargs})

"""The four-stage body that RAVLT and MAViT share."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, cast

import torch
from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers import AttentionBlock, ConvDownsample, ConvStem, rotary_table
from linvit.layers.attention import AXES
from linvit.layers.checks import Depth, Device, Dtype, Rate, Ratio, Scale, TensorOptions, multiple_of_heads
from linvit.layers.convolutions import PointwiseConv
from linvit.models.backbone import POOLS, PooledBackbone, Stage
from linvit.models.family import imagenet_cfg, nano_cfgs, renamed, stage_mechanisms, unwrapped, warn_of_pattern
from linvit.models.pretrained import create
from linvit.models.recomputing import recomputed
from linvit.ops import rotary_1d
from linvit.ranges import Amount, Count, OneOf, check

SIZES: Mapping[str, dict[str, Any]] = {
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

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module], head_width: int, rope: bool = True) -> None:
        super().__init__(downsample, blocks)
        self.head_width, self.rope = head_width, rope
        self.first_row = 0  # of the map, while the network reads only some of the rows

    def forward(self, x: Tensor) -> Tensor:
        x = recomputed(self.recomputed, self.downsample, x)
        return self.through_blocks(x, rotary_table(x, self.head_width, self.first_row) if self.rope else None)


class Pyramid(PooledBackbone):
    """Stem, four stages at strides 4, 8, 16, 32, a 1×1 convolution with batch norm and SiLU, a linear classifier.

    Args:
        in_chans: channels of the images.
        num_classes: outputs of the classifier, 0 for no classifier.
        global_pool: pooling before the classifier, a name in POOLS; "" to apply it at every position.
        widths, depths, heads: channels, blocks and heads of each stage.
        pattern: one letter per stage: L for the linear attention of the family, S for softmax attention.
        attention: options of Attention2d: feature_map, weighting, normalizer (only used in linear stages), modulation,
            lepe, rope.
        cpe: start every block with a 3×3 depthwise convolution, the conditional position encoding.
        ffn_ratio: hidden channels of the feed-forward over width.
        layer_scale: initial layer scale of each stage.
        final_width: channels of the last convolution, which the classifier reads.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 over all blocks.

    Raises TypeError or ValueError for an argument outside its range; on forward for anything but floating-point images
    with in_chans channels and sides of at least 32 px.
    """

    linear: str
    sizes: ClassVar[Mapping[str, dict[str, Any]]] = SIZES
    block_class: ClassVar[type[AttentionBlock]] = AttentionBlock
    final_widths: ClassVar[Mapping[str, int]] = {}  # other than the default, by size

    def __init__(
        self,
        in_chans: Count = 3,
        num_classes: Amount = 1000,
        global_pool: Annotated[str, OneOf(POOLS)] = "avg",
        widths: tuple[Count, Count, Count, Count] = (64, 128, 256, 512),
        depths: tuple[Depth, Depth, Depth, Depth] = (2, 2, 6, 2),
        heads: tuple[Count, Count, Count, Count] = (1, 2, 4, 8),
        pattern: str = "LLSS",
        attention: dict[str, Any] | None = None,
        cpe: bool = True,
        ffn_ratio: Ratio = 3.5,
        layer_scale: tuple[Scale, Scale, Scale, Scale] = (1.0, 1.0, 1.0, 1.0),
        final_width: Count = 1024,
        drop_rate: Rate = 0.0,
        drop_path_rate: Rate = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_chans, num_classes, drop_rate, pattern, widths)
        dd: TensorOptions = {"device": device, "dtype": dtype}
        mechanisms = stage_mechanisms(pattern, {"L": self.linear, "S": "softmax"})
        check(self.block_class.attention_class, attention or {})
        unheeded = [key for key in attention or {} if key in AXES]
        if unheeded and "L" not in pattern:
            raise SettingError(
                f"`attention` has {unheeded[0]!r}, but {pattern} has no linear stage: remove it or change `pattern`"
            )
        head_widths = list(map(multiple_of_heads, widths, heads))
        rope = (attention or {}).get("rope", True)
        rates = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
        self.stem = ConvStem(in_chans, widths[0], **dd)
        self.stages = nn.Sequential()
        for i, width in enumerate(widths):
            downsample = ConvDownsample(widths[i - 1], width, **dd) if i else nn.Identity()
            options: dict[str, Any] = {
                "attention": attention,
                "cpe": cpe,
                "ffn_ratio": ffn_ratio,
                "layer_scale": layer_scale[i],
                **dd,
            }
            blocks = [self.block_class(width, heads[i], mechanisms[i], drop_path=rate, **options) for rate in rates[i]]
            self.stages.append(PyramidStage(downsample, blocks, head_widths[i], rope))
        final = {"conv": PointwiseConv(widths[-1], final_width, **dd), "norm": nn.BatchNorm2d(final_width, **dd)}
        self.final_conv = nn.Sequential(OrderedDict(final, act=nn.SiLU()))
        self.add_head(final_width, global_pool, **dd)

    def native_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint of the authors with our key names; one with our names is returned unchanged.

        Wrappers and `module.` are removed (see family.unwrapped). The released classifier is a 1×1 convolution, ours a
        linear layer. The released RoPE.angle buffers are compared with our formula and dropped.

        Raises ValueError if the angles in a RoPE.angle buffer differ from ours.
        """
        weights = unwrapped(state_dict)
        if not any(key.startswith(_RELEASED) for key in weights):
            return weights
        warn_of_pattern(self, "LLSS")
        native = {}
        for key, value in weights.items():
            if key.endswith(".RoPE.angle"):
                _compare_angles(key, value, self)
                continue
            key = renamed(key, _RULES)
            native[key] = value.flatten(1) if key == "head.fc.weight" else value
        return native


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


def _compare_angles(key: str, angle: Tensor, model: Pyramid) -> None:
    number = int(key.split(".")[1])
    if number >= len(model.stages):
        return
    stage = cast(PyramidStage, model.stages[number])
    rotary = rotary_1d(1, stage.head_width // 2, start=1, dtype=torch.float64)
    expected = torch.atan2(rotary.sin, rotary.cos)[0].repeat_interleave(2)
    if angle.shape != expected.shape:
        raise ValueError(
            f"{key} has shape {tuple(angle.shape)}, expected {tuple(expected.shape)}: "
            f"create the model with the head widths of the checkpoint"
        )
    tolerance = max(1e-5, 8 * torch.finfo(angle.dtype).eps)
    if not torch.allclose(angle.double().cpu(), expected, rtol=tolerance, atol=0):
        raise ValueError(
            f"{key} has other angles than 10000^-linspace(0, 1, {len(expected) // 2}): "
            f"the checkpoint belongs to another position encoding"
        )


def pyramid_cfgs(family: str) -> dict[str, Any]:
    """timm's configurations of a family: the authors' files on the hub, the nano size, and variants without weights."""
    name = family.lower()
    cfgs = nano_cfgs(f"{name}_nano")
    for size in ("tiny", "small", "base", "large"):
        file = f"{family}_{size[0].upper()}.pth"
        cfgs[f"{name}_{size}.in1k"] = imagenet_cfg(hf_hub_id=f"aldjalkdf/{family}", hf_hub_filename=file)
        cfgs[f"{name}_{size}_linear.untrained"] = imagenet_cfg()
    return dict(generate_default_cfgs(cfgs))


Network = TypeVar("Network", bound=Pyramid)


def create_pyramid(network: type[Network], variant: str, pretrained: bool, **kwargs: Any) -> Network:
    """A registered variant of a family; kwargs override the arguments of its size."""
    size = variant.split("_")[1]
    final = {"final_width": network.final_widths[size]} if size in network.final_widths else {}
    arguments = network.sizes[size] | final
    if variant.endswith("_linear"):
        arguments["pattern"] = "LLLL"
    return cast(Network, create(network, variant, pretrained, **{**arguments, **kwargs}))

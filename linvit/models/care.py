"""CARE transformers: linear attention and convolution on disjoint channels, with a memory and a dual interaction.

CARE Transformer: Mobile-Friendly Linear Visual Transformer via Decoupled Dual Interaction, CVPR 2025,
https://arxiv.org/abs/2411.16170

    features = [attended | local 3×3 | local 7×7],  x = [memory | features]
    y_i = κ(q_i) · mean_j κ(k_j) ⊗ x_j  /  (κ(q_i) · mean_j κ(k_j) + ε),  κ = elu + 1     (attended; value = input)
    out = interact([memory | interact(mixed features)])

Axes: feature map elu1, weighting uniform, normalizer divide, no rotation.

Where paper and released code differ, we follow the code: the paper calls κ an identity, has the expansion
ratio 4 in every block, and does not mention the distillation with two heads.

| size | widths         | depths    | ratios                           | parameters |
|------|----------------|-----------|----------------------------------|------------|
| s0   | 32 64 128 256  | 2 4 8 4   | (2, 2) (2, 4) (4, 4) (4, 4)      |  7,340,000 |
| s1   | 32 64 128 256  | 3 6 10 6  | (2, 4) (2, 4) (4, 4) (4, 4)      |  9,602,424 |
| s2   | 32 64 192 384  | 3 6 10 6  | (4, 4) (4, 4) (4, 4) (4, 4)      | 19,481,288 |

Pattern "CCLL" as released: strip convolutions in the first two stages, linear attention in the last two. No weights
are published on a hub. The nano size is ours, for images of 32 to 64 px.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Unpack, cast

from timm.layers import calculate_drop_path_rates, get_device_dtype
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from linvit.layers import CareBlock, PatchDownsample, PatchStem
from linvit.layers.checks import Depth, Device, Dtype, Rate, Scale, TensorOptions
from linvit.models.backbone import Backbone, Stage
from linvit.models.family import (
    imagenet_cfg,
    nano_cfgs,
    register,
    renamed,
    stage_mechanisms,
    unwrapped,
    warn_of_pattern,
)
from linvit.models.pretrained import create
from linvit.ranges import Amount, Count, OneOf

SIZES: Mapping[str, dict[str, Any]] = {
    "care_nano": {
        "widths": (32, 48, 64, 96),
        "depths": (1, 1, 2, 2),
        "ratios": ((2, 2), (2, 2), (4, 4), (4, 4)),
        "head_widths": (8, 12, 16, 12),
        "layer_scale": 1.0,
    },
    "care_s0": {},
    "care_s1": {"depths": (3, 6, 10, 6), "ratios": ((2, 4), (2, 4), (4, 4), (4, 4))},
    "care_s2": {"widths": (32, 64, 192, 384), "depths": (3, 6, 10, 6), "ratios": ((4, 4),) * 4},
}
Pair = tuple[Count, Count]
LETTERS = {"C": "strips", "L": "linear", "S": "softmax"}


class CareHead(nn.Module):
    """GELU, layer norm, dropout and a linear layer over the last dimension."""

    norm: nn.Module
    fc: nn.Module

    def __init__(self, width: int, num_classes: int, drop_rate: float = 0.0, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(width, eps=1e-6, **dd)
        self.drop = nn.Dropout(drop_rate)
        self.fc = nn.Linear(width, num_classes, **dd) if num_classes > 0 else nn.Identity()

    def reset(self, width: int, num_classes: int, device: Device = None, dtype: Dtype = None) -> None:
        """A new linear layer; the norm stays."""
        self.fc = nn.Linear(width, num_classes, device=device, dtype=dtype) if num_classes > 0 else nn.Identity()
        self.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.drop(self.norm(self.act(x)))
        return x if pre_logits else self.fc(x)


class CARE(Backbone):
    """Stem, four stages at strides 4, 8, 16, 32, pooling, and two heads whose logits are averaged.

    Args:
        in_chans: channels of the images.
        num_classes: outputs of the classifiers, 0 for no classifiers.
        global_pool: "avg", or "" to apply the heads at every position.
        widths, depths: channels (a multiple of 4; the first quarter is the memory) and blocks of each stage.
        ratios: hidden channels over width of the two interactions, for each stage.
        head_widths: channels per attention head, for each stage; unused in stages without attention.
        pattern: one letter per stage: C for strip convolutions, L for linear attention, S for softmax attention.
        layer_scale: initial layer scale.
        split, interactions, memory, local_sizes: see CareBlock. Without the second interaction the classifiers read
            `widths[-1]` channels instead of `ratios[-1][1]` times as many.
        distillation: add a second head, which learns from a teacher.
        drop_rate: dropout before the classifiers.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 over all blocks.

    Raises TypeError or ValueError for an argument outside its range; on forward for anything but floating-point images
    with in_chans channels and sides of at least 32 px.
    """

    def __init__(
        self,
        in_chans: Count = 3,
        num_classes: Amount = 1000,
        global_pool: Annotated[str, OneOf(("avg", ""))] = "avg",
        widths: tuple[Count, Count, Count, Count] = (32, 64, 128, 256),
        depths: tuple[Depth, Depth, Depth, Depth] = (2, 4, 8, 4),
        ratios: tuple[Pair, Pair, Pair, Pair] = ((2, 2), (2, 4), (4, 4), (4, 4)),
        head_widths: tuple[Count, Count, Count, Count] = (8, 16, 16, 32),
        pattern: str = "CCLL",
        layer_scale: Scale = 1e-6,
        split: str = "asymmetric",
        interactions: tuple[bool, bool] = (True, True),
        memory: bool = True,
        local_sizes: tuple[int, ...] = (3, 7),
        distillation: bool = True,
        drop_rate: Rate = 0.0,
        drop_path_rate: Rate = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        channels = (*widths[:-1], widths[-1] * ratios[-1][1] if interactions[1] else widths[-1])
        super().__init__(in_chans, num_classes, drop_rate, pattern, channels)
        dd: TensorOptions = {"device": device, "dtype": dtype}
        mechanisms = stage_mechanisms(pattern, LETTERS)
        self.global_pool = global_pool
        self.distilled_training = False
        rates = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
        self.stem = PatchStem(in_chans, widths[0], **dd)
        self.stages = nn.Sequential()
        end = (len(widths) - 1, depths[-1] - 1)
        for i, width in enumerate(widths):
            downsample = PatchDownsample(widths[i - 1], width, **dd) if i else nn.Identity()
            block = partial(
                CareBlock,
                width,
                head_widths[i],
                mechanisms[i],
                ratios[i],
                layer_scale,
                split=split,
                interactions=interactions,
                memory=memory,
                local_sizes=local_sizes,
                **dd,
            )
            blocks = [block(drop_path=rate, last=(i, j) == end) for j, rate in enumerate(rates[i])]
            self.stages.append(Stage(downsample, blocks))
        self.final_conv = nn.Identity()
        self.num_features = self.head_hidden_size = channels[-1]
        self.head = CareHead(self.num_features, num_classes, drop_rate, **dd)
        self.dist_head = CareHead(self.num_features, num_classes, drop_rate, **dd) if distillation else None
        self.init_weights(needs_reset=False)

    def set_distilled_training(self, enable: bool = True) -> None:
        """In training mode return (logits, distilled logits) instead of their mean."""
        self.distilled_training = enable

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The last linear layer, or both if there are two heads."""
        return self.head.fc if self.dist_head is None else (self.head.fc, self.dist_head.fc)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New classifiers for num_classes (0: none); None keeps the pooling."""
        super().reset_classifier(num_classes, global_pool)
        if global_pool is not None:
            self.global_pool = global_pool
        self.head_hidden_size = self.num_features
        for head in (self.head, self.dist_head):
            if head is not None:
                head.reset(self.num_features, num_classes, **get_device_dtype(self))

    def native_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint of the authors with our key names; one with our names is returned unchanged.

        Wrappers and `module.` are removed (see family.unwrapped).
        """
        weights = unwrapped(state_dict)
        if not any(name in key for key in weights for name in _RELEASED):
            return weights
        warn_of_pattern(self, "CCLL")
        return {renamed(key, _RULES): value for key, value in weights.items()}

    def remove_head(self) -> None:
        """Remove all parameters after the unpooled map."""
        super().remove_head()
        for head in (self.head, self.dist_head):
            if head is not None:
                head.norm = nn.Identity()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The unpooled map to logits, or with pre_logits to the mean of the two classifiers' inputs."""
        x = x.mean((2, 3)) if self.global_pool == "avg" else x.permute(0, 2, 3, 1)
        out: Tensor = self.head(x, pre_logits)
        if self.dist_head is not None:
            distilled: Tensor = self.dist_head(x, pre_logits)
            if self.distilled_training and self.training and not pre_logits:
                return out, distilled
            out = (out + distilled) / 2
        return out if self.global_pool == "avg" else out.permute(0, 3, 1, 2)


_RELEASED = (".token_mixer.", ".inter_layer.")
_RULES = [
    (r"\.downsample\.0\.", ".downsample.norm."),
    (r"\.downsample\.1\.", ".downsample.conv."),
    (r"\.token_mixer\.dwconvatt_1\.", ".mixer.attended.vertical."),
    (r"\.token_mixer\.dwconvatt_2\.", ".mixer.attended.horizontal."),
    (r"\.token_mixer\.qk\.", ".mixer.attended.qk."),
    (r"\.token_mixer\.dwconv1\.", ".mixer.local3."),
    (r"\.token_mixer\.dwconv2\.", ".mixer.local7."),
    (r"\.inter_layer\.inter1_", ".interact_features."),
    (r"\.inter_layer\.inter2_", ".interact_memory."),
]


_HEADS = ("head.fc", "dist_head.fc")
default_cfgs = generate_default_cfgs(
    nano_cfgs("care_nano", classifier=_HEADS)
    | {f"care_{size}.untrained": imagenet_cfg(classifier=_HEADS) for size in ("s0", "s1", "s2")}
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> CARE:
    return cast(CARE, create(CARE, variant, pretrained, **{**SIZES[variant], **kwargs}))


register(_create, default_cfgs, __name__)

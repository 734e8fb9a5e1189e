"""The base of every family, with timm's interface: stem, four stages, a last layer, a head."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Unpack, cast

from timm.layers import ClassifierHead, get_device_dtype, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.checks import TensorOptions
from linvit.models.family import unwrapped
from linvit.models.recomputing import BLOCKS, CHEAP, NOTHING, WHAT, recomputed
from linvit.ranges import Checked, OneOf, check

POOLS = ("", "avg", "max", "avgmax", "catavgmax", "fast", "fastavg", "fastmax", "fastavgmax", "fastcatavgmax")


class Stage(nn.Module):
    """Downsampling (the identity in the first stage), then blocks."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.recomputed = NOTHING  # in the backward pass, a name in WHAT
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.through_blocks(recomputed(self.recomputed, self.downsample, x))

    def through_blocks(self, x: Tensor, *shared: Any) -> Tensor:
        """The map after all blocks; every block also gets `shared`."""
        for block in self.blocks:
            x = recomputed(self.recomputed, block, x, *shared, block=True)
        return x


class Backbone(Checked, nn.Module):
    """The part that all families share; a family adds stem, stages, final_conv and head.

    Attributes:
        num_classes: outputs of the classifier.
        in_chans: channels of the images.
        pattern: one letter per stage, its mechanism.
        feature_info: channels and stride of each stage's output.
        num_features: channels of the unpooled map that forward_features returns.
        head_hidden_size: channels that the classifier reads.
    """

    stem: nn.Module
    stages: nn.Sequential
    final_conv: nn.Module
    num_features: int
    head_hidden_size: int

    def __init__(
        self, in_chans: int, num_classes: int, drop_rate: float, pattern: str, channels: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.in_chans, self.num_classes, self.drop_rate, self.pattern = in_chans, num_classes, drop_rate, pattern
        self.recomputed = NOTHING  # in the backward pass of the stem, a name in WHAT
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": width, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, width in enumerate(channels)
        ]

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize all weights; needs_reset also resets norms and layer scales (after to_empty)."""
        if not next(self.parameters()).is_meta:  # nothing to fill, and torch takes long over it
            self.apply(partial(init_weights, needs_reset=needs_reset))

    def no_weight_decay(self) -> set[str]:
        """Empty: as in the released training, timm's rule for vectors is enough."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's parameter groups for layer-wise learning rates."""
        blocks = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^final_conv", (99999,)),
        ]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        self.set_recomputing(BLOCKS if enable else NOTHING)

    def set_recomputing(self, what: str = CHEAP) -> None:
        """Choose what the backward pass computes again instead of keeping it.

        Args:
            what: "nothing"; "cheap": norms, activations, depthwise convolutions and sums, so that of stem, downsampling
                and blocks only inputs, products and attention are kept; "blocks": everything in blocks.

        Gradients are the same. With "cheap" no product is computed twice.
        """
        check({"what": Annotated[str, OneOf(WHAT)]}, {"what": what})
        self.recomputed = what
        for stage in cast(Iterable[Stage], self.stages):
            stage.recomputed = what

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of the chosen stages and, unless intermediates_only, the final features before them.

        Args:
            x: images (batch, in_chans, height, width).
            indices: an int n for the last n stages, None for all, or a list of stages.
            norm: has no effect: the outputs of the stages are not normalized.
            stop_early: skip the stages after the last chosen one.
            output_fmt: "NCHW".
            intermediates_only: return only the list of maps.

        Raises ValueError for another output format.
        """
        if output_fmt != "NCHW":
            raise SettingError(f"`output_fmt` is {output_fmt!r}, expected 'NCHW': permute the maps afterwards")
        taken, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = recomputed(self.recomputed, self.stem, x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in taken:
                intermediates.append(x)
        if intermediates_only:
            return intermediates
        if not stop_early or last == len(self.stages) - 1:
            x = self.final_conv(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove all layers after the chosen stages; final_conv stays only with the last stage, without prune_norm."""
        taken, last = feature_take_indices(len(self.stages), indices)
        without_final = prune_norm or last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if without_final:
            self.final_conv = nn.Identity()
            self.num_features = self.feature_info[last]["num_chs"]
        if prune_head or without_final:
            self.remove_head()
        return taken

    def remove_head(self) -> None:
        """Remove all parameters after the unpooled map."""
        self.reset_classifier(0, "")

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for num_classes (0: none); None keeps the pooling."""
        check(type(self), {"num_classes": num_classes, **({} if global_pool is None else {"global_pool": global_pool})})
        self.num_classes = num_classes

    def native_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The weights of a checkpoint with our key names; families with released weights translate theirs."""
        return unwrapped(state_dict)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """The unpooled map to logits."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, height, width) to the unpooled map (batch, num_features, height/32, width/32)."""
        return self.final_conv(self.stages(recomputed(self.recomputed, self.stem, x)))

    def forward(self, x: Tensor) -> Any:
        """Images to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))


class PooledBackbone(Backbone):
    """A Backbone with timm's head: pooling, dropout and a linear layer."""

    def add_head(self, width: int, global_pool: str, **dd: Unpack[TensorOptions]) -> None:
        """The head for maps of that many channels, and initial weights; global_pool: a name in POOLS."""
        self.num_features = width
        self.head = ClassifierHead(width, self.num_classes, pool_type=global_pool, drop_rate=self.drop_rate, **dd)
        self.head_hidden_size = self.head.num_features
        self.init_weights(needs_reset=False)

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for num_classes (0: none); None keeps the pooling."""
        super().reset_classifier(num_classes, global_pool)
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **get_device_dtype(self))
        self.head_hidden_size = self.head.num_features

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The unpooled map to logits, or with pre_logits to the input of the classifier."""
        if not self.head.global_pool.pool_type:
            return self.head(x.permute(0, 2, 3, 1), pre_logits).permute(0, 3, 1, 2)
        return self.head(x, pre_logits)


def init_weights(module: nn.Module, needs_reset: bool) -> None:
    """Initialize one module as released: truncated normal weights (deviation 0.02, cut at ±2), biases 0.

    Args:
        module: any module of a network.
        needs_reset: also reset norms and layer scales, which their constructors have initialized already.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset and callable(reset := getattr(module, "reset_parameters", None)):
        reset()

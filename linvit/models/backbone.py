"""The body of every family as timm wants it: stem, four stages, a last layer, a head."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from timm.layers import trunc_normal_
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn


class Stage(nn.Module):
    """Downsampling (the identity in the first stage), then blocks."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module]):
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.through_blocks(self.downsample(x))

    def through_blocks(self, x: Tensor, *shared: Any) -> Tensor:
        """What the blocks make of a map; `shared` is given to each beside it."""
        for block in self.blocks:
            x = checkpoint(block, x, *shared) if self.grad_checkpointing else block(x, *shared)
        return x


class Backbone(nn.Module):
    """What does not depend on the family; a family makes stem, stages, final_conv and the heads.

    Attributes:
        num_classes, in_chans: of the classifier and of the images.
        pattern: one letter a stage, the mechanism in it.
        feature_info: channels and stride of each stage's output.
        num_features: channels of the unpooled map that forward_features returns.
        head_hidden_size: width of what the classifier reads.
    """

    def __init__(self, in_chans: int, num_classes: int, drop_rate: float, pattern: str, channels: tuple[int, ...]):
        super().__init__()
        self.in_chans, self.num_classes, self.drop_rate, self.pattern = in_chans, num_classes, drop_rate, pattern
        self.feature_info = [
            {"num_chs": width, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, width in enumerate(channels)
        ]

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights; needs_reset also resets norms and layer scales (after to_empty)."""
        self.apply(partial(init_weights, needs_reset=needs_reset))

    def no_weight_decay(self) -> set[str]:
        """Nothing beyond timm's rule for vectors, as in the released training."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict:
        """Groups for layer-wise learning rates."""
        blocks = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^final_conv", (99999,)),
        ]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The outputs of the chosen stages, and the final features unless intermediates_only.

        Args:
            x: images.
            indices: the last n stages for an int, all for None, else these stages.
            norm: without effect; the stages' outputs are not normed.
            stop_early: leave out the stages after the last chosen one.
            output_fmt: "NCHW".
            intermediates_only: return the list alone.

        Raises:
            ValueError: for another output format.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}, expected 'NCHW': permute the maps afterwards")
        taken, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.stem(x)
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
        """Drop what the chosen stages do not need; the last layer goes with the last stage or with prune_norm."""
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
        """Leave nothing behind the unpooled map that has parameters."""
        self.reset_classifier(0, "")

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, height, width) to the unpooled map (batch, num_features, height/32, width/32)."""
        return self.final_conv(self.stages(self.stem(x)))

    def forward(self, x: Tensor):
        """Images to logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x))


def init_weights(module: nn.Module, needs_reset: bool) -> None:
    """Initialise one module as released: weights from a normal of 0.02 cut at ±2, biases 0; to be applied to all.

    Args:
        module: any module of a network.
        needs_reset: whether norms and layer scales, right since their construction, are set again.
    """
    if isinstance(module, nn.Conv2d | nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset and hasattr(module, "reset_parameters"):
        module.reset_parameters()

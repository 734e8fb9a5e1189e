"""CARE's block and heads for inference: channels last, no batch norms or layer scales, one head."""

from typing import cast

import torch
from torch import Tensor, nn

from linvit.fusion import folds
from linvit.fusion.folds import OnLast, first, last, plus
from linvit.fusion.pyramid import fused_stem
from linvit.layers import CareBlock, Interaction, Operator, PatchDownsample, PatchStem, TokenMixer
from linvit.layers.convolutions import DepthwiseConv
from linvit.layers.mixer import Strips, ValueAttention, joined, mixed
from linvit.models.care import CARE, CareHead
from linvit.ops.backend import depthwise_kernels_for

KNOWN = (CareBlock, TokenMixer, Strips, ValueAttention, Operator, Interaction, nn.BatchNorm2d, *folds.LAYERS)
"""The layers of a block that can be folded."""


def keeps_kernels(x: Tensor) -> bool:
    """Whether convolutions of several sizes stay so: on GPUs, whose kernels compute all of them in one launch."""
    return x.is_cuda or depthwise_kernels_for(x) is not None


class FusedStrips(nn.Module):
    """Strips as one convolution; on a GPU as they are, of a fifth of the products."""

    def __init__(self, strips: Strips):
        super().__init__()
        self.strips = strips
        self.dense = folds.summed([strips.vertical, strips.horizontal])

    def forward(self, x: Tensor) -> Tensor:
        return self.strips(x) if keeps_kernels(x) else self.dense(x)


class FusedMixer(nn.Module):
    """TokenMixer on (batch, height, width, channels), with its local convolutions as one; on a GPU as they are."""

    def __init__(self, mixer: TokenMixer):
        super().__init__()
        self.widths = self.apart = mixer.widths
        attended: nn.Module = mixer.attended
        attended = FusedStrips(attended) if isinstance(attended, Strips) else folds.products(attended, "qk")
        local = [conv for conv in (mixer.local3, mixer.local7) if conv is not None]
        self.stacked = mixer.stacked
        self.local = nn.ModuleList(() if self.stacked else local)
        self.groups: nn.Sequential | nn.ModuleList
        if self.stacked:
            self.groups = nn.Sequential(*(OnLast(folds.channels_last(conv)) for conv in local), OnLast(attended))
        else:
            self.groups = nn.ModuleList([OnLast(attended)])
            if local:
                self.groups.append(OnLast(folds.side_by_side(local)))
                self.widths = [mixer.widths[0], sum(mixer.widths[1:])]

    def forward(self, x: Tensor) -> Tensor:
        if self.stacked:
            return self.groups(x)
        if keeps_kernels(x):
            attended = cast(OnLast, self.groups[0]).layer
            attended = attended.strips if isinstance(attended, FusedStrips) else attended
            return last(joined(mixed(first(x), self.apart, attended, cast(list[DepthwiseConv], list(self.local)))))
        channels = x.split(self.widths, dim=-1)
        return torch.cat([group(y) for group, y in zip(self.groups, channels, strict=True)], dim=-1)


class FusedInteraction(nn.Module):
    """Interaction on (batch, height, width, channels) without its skip connection, its norm folded into fc1."""

    def __init__(self, interaction: Interaction):
        super().__init__()
        self.fc1 = folds.linear(folds.after_batch_norm(interaction.fc1, interaction.norm), "gelu")
        self.conv = folds.channels_last(interaction.conv)
        self.fc2 = None if interaction.fc2 is None else folds.linear(interaction.fc2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = folds.after_gelu(self.fc1, self.conv, x)
        return hidden if self.fc2 is None else self.fc2(hidden)


class FusedCareBlock(nn.Module):
    """CareBlock; maps in and out are (batch, channels, height, width), channels last in memory."""

    def __init__(self, block: CareBlock):
        super().__init__()
        self.memory_width = block.memory_width
        self.gamma = block.gamma
        features, memory = block.interact_features, block.interact_memory
        if self.gamma is not None and memory is not None:
            folds.scaled(cast(folds.Affine, memory.fc2), self.gamma)  # a layer scale comes with the projection
        self.mixer = FusedMixer(block.mixer)
        self.interact_features = None if features is None else FusedInteraction(features)
        self.interact_memory = None if memory is None else FusedInteraction(memory)

    def forward(self, x: Tensor) -> Tensor:
        x = last(x)
        mixed = self.mixer(x[..., self.memory_width :])
        if self.interact_features is not None:
            mixed = plus(self.interact_features(mixed), mixed)
        if self.memory_width > 0:
            mixed = torch.cat((x[..., : self.memory_width], mixed), dim=-1)
        out = None if self.interact_memory is None else self.interact_memory(mixed)
        if self.gamma is not None:
            x = torch.addcmul(x, mixed, self.gamma)
            out = x if out is None else plus(out, x)
        return first(cast(Tensor, out))


class FusedCareHead(nn.Module):
    """The mean of CARE's heads as one: GELU, layer norm and a linear layer."""

    def __init__(self, heads: list[CareHead]):
        super().__init__()
        self.act = heads[0].act
        self.weight, self.bias = (
            nn.Parameter(torch.stack([getattr(head.norm, name) for head in heads]).mean(0), requires_grad=False)
            for name in ("weight", "bias")
        )
        for head in heads:
            self.norm = folds.after_layer_norm(
                cast(nn.LayerNorm, head.norm), [head.fc] if isinstance(head.fc, nn.Linear) else []
            )
        classifiers = [head.fc for head in heads if isinstance(head.fc, nn.Linear)]
        self.fc = folds.averaged(classifiers) if classifiers else nn.Identity()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The mean of the classifiers' outputs; with pre_logits, their mean input."""
        x = self.norm(self.act(x))
        if pre_logits or isinstance(self.fc, nn.Identity):
            return x * self.weight + self.bias
        return self.fc(x)


def fused_care(model: CARE) -> CARE:
    """The network with one head instead of two; its other layers are fused already."""
    heads = [head for head in (model.head, model.dist_head) if head is not None]
    known = (CareHead, nn.GELU, nn.LayerNorm, nn.Dropout, nn.Linear, nn.Identity)
    if all(folds.made_of(head, *known) and isinstance(head.norm, nn.LayerNorm) for head in heads):
        model.head, model.dist_head = cast(CareHead, FusedCareHead(heads)), None
    return model


def fused_block(block: CareBlock) -> nn.Module:
    """The block for inference; a block with layers of unknown classes stays as it is."""
    return FusedCareBlock(block) if folds.made_of(block, *KNOWN) else block


def fused_downsample(downsample: PatchDownsample) -> nn.Module:
    """One channels-last convolution; it pads nothing, so the norm before it can be folded in."""
    if not folds.made_of(downsample, PatchDownsample, nn.Conv2d, nn.BatchNorm2d):
        return downsample
    return folds.channels_last(folds.after_batch_norm(downsample.conv, downsample.norm))


FOLDS: folds.Folds = {
    CareBlock: fused_block,
    PatchDownsample: fused_downsample,
    PatchStem: fused_stem,
    CARE: fused_care,
}

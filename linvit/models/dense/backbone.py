"""A classification network as the backbone of detectors and segmentors: four maps at strides 4, 8, 16, 32.

The released dense backbones of RAVLT and MAViT have a layer norm after each stage, on the output alone: the map that
goes on to the next stage is not normed. Classification does not train these norms. Everything after the last stage
(convolution, batch norm, classifier) is gone.

CARE's dense code is not released. Its maps are the stages' outputs as they are, memory channels included; the last
stage's has the classifier's width (four times the stage's), so every weight that classification trained is used.
"""

import timm
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from linvit.models.backbone import Backbone
from linvit.models.family import unwrapped
from linvit.models.pyramid import Pyramid

_STRIDES = (4, 8, 16, 32)
_DEEPER = ("body.body.", "body.norms.")
_CLASSIFIER = ("proj.", "norm.", "head.", "final_conv.", "dist_head.")


class DenseBackbone(nn.Module):
    """Four maps (batch, channels, height, width) of any model of ours or any four-stage timm `features_only` model.

    Args:
        name: a model that timm knows.
        kwargs: arguments of timm.create_model: pretrained, pattern, drop_path_rate, device, …

    Attributes:
        body: the network without its classifier.
        norms: four LayerNorm2d (ε 1e-6) on the maps of RAVLT and MAViT, identities for every other model.
        channels: of the four maps.

    Raises:
        ValueError: if the model has no maps at strides 4, 8, 16 and 32.
    """

    def __init__(self, name: str, **kwargs):
        super().__init__()
        ours = timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("linvit.models.")
        body = timm.create_model(name, **kwargs) if ours else None
        if isinstance(body, Backbone):
            body.prune_intermediate_layers([0, 1, 2, 3], prune_norm=True)
            maps = body.feature_info
        else:
            body = timm.create_model(name, features_only=True, **kwargs)
            if tuple(body.feature_info.reduction()[-4:]) == _STRIDES:
                indices = body.feature_info.out_indices[-4:]
                body = timm.create_model(name, features_only=True, out_indices=indices, **kwargs)
            maps = body.feature_info.get_dicts()
        self.channels = tuple(entry["num_chs"] for entry in maps)
        strides = tuple(entry["reduction"] for entry in maps)
        if strides != _STRIDES:
            raise ValueError(f"{name} has maps at strides {strides}, expected {_STRIDES}: choose a four-stage model.")
        self.body = body
        first = next(body.parameters())
        dd = {"device": first.device, "dtype": first.dtype}
        normed = isinstance(body, Pyramid)
        self.norms = nn.ModuleList(
            LayerNorm2d(width, eps=1e-6, **dd) if normed else nn.Identity() for width in self.channels
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of keeping their activations."""
        body = self.body if isinstance(self.body, Backbone) else getattr(self.body, "model", self.body)
        body.set_grad_checkpointing(enable)

    def forward(self, x: Tensor) -> list[Tensor]:
        if isinstance(self.body, Backbone):
            maps = self.body.forward_intermediates(x, intermediates_only=True)
        else:
            maps = self.body(x)
            if getattr(self.body, "output_fmt", None) == "NHWC":
                maps = [tensor.permute(0, 3, 1, 2) for tensor in maps]
        return [norm(tensor) for norm, tensor in zip(self.norms, maps, strict=True)]

    def native_state_dict(self, state_dict: dict) -> dict:
        """A checkpoint in our key names: a released dense backbone, alone or behind `backbone.`, or a classifier.

        Of a detector's or segmentor's checkpoint the backbone alone is taken. Of a classifier's, what comes after
        the stages is left out, and the output norms, which it lacks, stay as they are.
        """
        weights = unwrapped(state_dict)
        inner = {key.removeprefix("backbone."): value for key, value in weights.items() if key.startswith("backbone.")}
        weights = inner or weights
        # a detector of ours holds it one step deeper, beside its neck
        deeper = {key.removeprefix("body."): value for key, value in weights.items() if key.startswith(_DEEPER)}
        native = {key: value for key, value in (deeper or weights).items() if key.startswith(("body.", "norms."))}
        if native:
            return native
        if not isinstance(self.body, Backbone):
            return {f"body.{key}": value for key, value in weights.items()}
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

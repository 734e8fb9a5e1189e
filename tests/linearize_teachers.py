"""Small networks of timm whose every parameter matters."""

import timm
import torch

SMALL = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def body(name, **kwargs):
    """Every parameter drawn, so that an error in any branch shows."""
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            fan = parameter[0].numel() if parameter.ndim > 1 else 10
            parameter.add_(torch.randn(parameter.shape) / fan**0.5)
    return model


def image(height=32, width=48):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))

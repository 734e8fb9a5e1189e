"""Networks in which no norm, scale, bias or statistic has the value at which leaving it out changes nothing."""

import torch
from torch import nn


def randomised(model: nn.Module) -> nn.Module:
    """The model in eval mode, every parameter and statistic drawn anew; what is folded shows in the output."""
    generator = torch.Generator().manual_seed(1)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                scales = isinstance(module, nn.LayerNorm | nn.BatchNorm2d) and name == "weight"
                if scales or name.startswith("gamma"):
                    parameter.copy_(1 + 0.3 * normal(parameter))
                elif parameter.ndim > 1:
                    parameter.copy_(normal(parameter) / parameter[0].numel() ** 0.5)
                else:
                    parameter.copy_(0.3 * normal(parameter))
            if isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
                module.running_mean.copy_(0.5 * normal(module.running_mean))
                module.running_var.copy_(0.5 + normal(module.running_var) ** 2)
    return model.eval()


def images(height: int, width: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest value."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    return ((got - expected).abs().max() / expected.abs().max()).item()

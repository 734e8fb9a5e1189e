"""Linear attention for vision: RALA/RAVLT, MALA/MAViT and CARE as one operator and timm models.

Importing this package registers its models with timm. `linvit.ops` alone needs only torch.
"""

from importlib.util import find_spec

__version__ = "0.1.0"

if find_spec("timm"):
    from linvit import models as models
    from linvit.fusion import fuse as fuse
    from linvit.models import swap_attention as swap_attention
    from linvit.released import load_released as load_released

"""The model families; importing this package registers them with timm."""

import linvit.models.hvittt
import linvit.models.nalaformer
import linvit.models.vittt  # noqa: F401  (registers its networks)
from linvit.models.care import CARE as CARE
from linvit.models.hugging_face import register_with_transformers as register_with_transformers
from linvit.models.hugging_face_students import align as align
from linvit.models.hugging_face_students import attention_errors as attention_errors
from linvit.models.hugging_face_students import transfer as transfer
from linvit.models.linearizing import default_cfgs as default_cfgs
from linvit.models.linearizing import linearize as linearize
from linvit.models.mavit import MAViT as MAViT
from linvit.models.pyramid import Pyramid as Pyramid
from linvit.models.ravlt import RAVLT as RAVLT
from linvit.models.swap import NAMES as NAMES
from linvit.models.swap import register_mechanism as register_mechanism
from linvit.models.swap import swap_attention as swap_attention

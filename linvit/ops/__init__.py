"""Linear attention as pure functions of tensors; needs torch alone."""

from linvit.ops.linear_attention import linear_attention as linear_attention
from linvit.ops.linear_attention import linear_attention_step as linear_attention_step
from linvit.ops.linear_attention import mala as mala
from linvit.ops.linear_attention import packed_linear_attention as packed_linear_attention
from linvit.ops.linear_attention import rala as rala
from linvit.ops.mixing import initial_mixing as initial_mixing
from linvit.ops.mixing import resized_mixing as resized_mixing
from linvit.ops.position import Rotary as Rotary
from linvit.ops.position import rotary_1d as rotary_1d
from linvit.ops.position import rotary_2d as rotary_2d
from linvit.ops.position import rotary_3d as rotary_3d
from linvit.ops.scores import attention_scores as attention_scores
from linvit.ops.state import State as State
from linvit.ops.state import merge as merge

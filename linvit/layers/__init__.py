"""Where parameters live: attention, CARE's token mixer, feed-forward, patches, blocks."""

from linvit.layers.attention import Attention2d as Attention2d
from linvit.layers.attention import rotary_table as rotary_table
from linvit.layers.block import AttentionBlock as AttentionBlock
from linvit.layers.block import CareBlock as CareBlock
from linvit.layers.block import ConvFeedForward as ConvFeedForward
from linvit.layers.mixer import Interaction as Interaction
from linvit.layers.mixer import TokenMixer as TokenMixer
from linvit.layers.operator import Operator as Operator
from linvit.layers.patches import ConvDownsample as ConvDownsample
from linvit.layers.patches import ConvStem as ConvStem
from linvit.layers.patches import PatchDownsample as PatchDownsample
from linvit.layers.patches import PatchStem as PatchStem

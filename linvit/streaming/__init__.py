"""A network over an image that is larger than memory: strip by strip, exactly.

The network is a sequence of steps, each from one map to the next: convolutions, which read some rows around a strip,
layers of single tokens, and attention, whose state adds up over strips. A step with attention therefore takes one pass
over the strips for each total that it needs (the state; for RALA, before it, the mean query) and one for its output.
"""

from linvit.streaming.computation import Streamed as Streamed
from linvit.streaming.computation import run_in_strips as run_in_strips
from linvit.streaming.steps import Query as Query

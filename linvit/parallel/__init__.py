"""One image, or one sequence, over many processes: exactly, by exchanging halos of rows and states of tokens."""

from linvit.parallel import cost as cost
from linvit.parallel.sharded import Sharded as Sharded
from linvit.parallel.sharded import rows_of as rows_of
from linvit.parallel.sharded import shard as shard

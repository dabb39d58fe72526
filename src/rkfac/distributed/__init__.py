"""Several processes that train one model: their statistics are added up, their refreshes are shared out."""

from rkfac.distributed.company import Company
from rkfac.distributed.sharding import cut_again, refuse_sharded
from rkfac.distributed.shards import Shards
from rkfac.distributed.statistics import Pooled
from rkfac.distributed.world import World

__all__ = ["Company", "Pooled", "Shards", "World", "cut_again", "refuse_sharded"]

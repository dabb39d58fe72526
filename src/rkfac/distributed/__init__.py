"""Several processes that train one model: their statistics are added up, their refreshes are shared out."""

from rkfac.distributed.agreement import agree
from rkfac.distributed.early import Early
from rkfac.distributed.ownership import Ownership
from rkfac.distributed.refresh import refresh
from rkfac.distributed.statistics import Pooled, pool
from rkfac.distributed.world import ALONE, World, world_of

__all__ = ["ALONE", "Early", "Ownership", "Pooled", "World", "agree", "pool", "refresh", "world_of"]

"""One running Kronecker factor: the contract, and its kinds."""

from rkfac.curvature.factor.base import Dropped, Factor, Refreshed, Start
from rkfac.curvature.factor.columns import ColumnsFactor
from rkfac.curvature.factor.dense import DenseFactor
from rkfac.curvature.factor.diagonal import DiagonalFactor
from rkfac.curvature.factor.identity import IdentityFactor
from rkfac.curvature.factor.online import Brand, OnlineFactor

__all__ = [
    "Brand",
    "ColumnsFactor",
    "DenseFactor",
    "DiagonalFactor",
    "Dropped",
    "Factor",
    "IdentityFactor",
    "OnlineFactor",
    "Refreshed",
    "Start",
]

"""One running Kronecker factor: the contract, and its kinds."""

from rkfac.curvature.factor.base import Factor, Refreshed, Start
from rkfac.curvature.factor.dense import DenseFactor
from rkfac.curvature.factor.diagonal import DiagonalFactor
from rkfac.curvature.factor.identity import IdentityFactor

__all__ = ["DenseFactor", "DiagonalFactor", "Factor", "IdentityFactor", "Refreshed", "Start"]

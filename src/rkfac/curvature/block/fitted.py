"""Blocks that collect curvature for other purposes than steps: eigenpairs in float64, whose damping may be changed later."""

from __future__ import annotations

from rkfac.curvature.block.eigen import EigenBlock
from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.block.tied import TiedBlock
from rkfac.curvature.block.unit import UnitBlock
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import DenseFactor


class PreciseFactor(DenseFactor):
    """Decomposed in float64 whatever the damping is, for it may become a smaller one."""

    def _ill_conditioned(self, request: Request) -> bool:
        return True


class FittedBlock(KroneckerBlock):
    """Of layers with two factors."""

    may_invert = False
    wide_factor = PreciseFactor


class FittedEigen(EigenBlock):
    """The same with second moments in the bases, which a second pass over the data collects."""

    wide_factor = PreciseFactor


class FittedTied(TiedBlock):
    """Of a table that is also a head."""

    may_invert = False
    wide_factor = PreciseFactor


class FittedUnits(UnitBlock):
    """Of scale-and-shift layers."""

    factor_type = PreciseFactor

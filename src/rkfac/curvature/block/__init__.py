"""One layer's curvature: the contract, and its kinds."""

from rkfac.curvature.block.base import Block, Group, Settings
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.gradients import LayerGradients, NormGradients, ShrunkBlock, Sketch
from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.block.unit import UnitBlock

__all__ = [
    "Block",
    "Direction",
    "Group",
    "KroneckerBlock",
    "LayerGradients",
    "NormGradients",
    "Settings",
    "ShrunkBlock",
    "Sketch",
    "UnitBlock",
]

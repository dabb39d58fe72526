"""One weight's curvature: the contract, and its kinds."""

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.eigen import Eigen, EigenBlock
from rkfac.curvature.block.fitted import FittedBlock, FittedEigen, FittedTied, FittedUnits
from rkfac.curvature.block.gradients import LayerGradients, NormGradients
from rkfac.curvature.block.kernel import Sketch
from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.block.online import ColumnsBlock, OnlineBlock
from rkfac.curvature.block.proximal import Proximal, ProximalKroneckerBlock, ProximalTiedBlock, ProximalUnitBlock
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.block.shrunk import ShrunkBlock
from rkfac.curvature.block.tied import TiedBlock
from rkfac.curvature.block.unit import UnitBlock

__all__ = [
    "Block",
    "ColumnsBlock",
    "Direction",
    "Eigen",
    "EigenBlock",
    "FittedBlock",
    "FittedEigen",
    "FittedTied",
    "FittedUnits",
    "Group",
    "KroneckerBlock",
    "LayerGradients",
    "NormGradients",
    "OnlineBlock",
    "Proximal",
    "ProximalKroneckerBlock",
    "ProximalTiedBlock",
    "ProximalUnitBlock",
    "Settings",
    "ShrunkBlock",
    "Sketch",
    "TiedBlock",
    "UnitBlock",
]

"""Curvature for other purposes than training: operators of layers and of whole models."""

from rkfac.operators.curvature import Curvature, load_curvature
from rkfac.operators.layer import Layer
from rkfac.operators.of_block import layer_of, why_not
from rkfac.operators.operator import Operator

__all__ = ["Curvature", "Layer", "Operator", "layer_of", "load_curvature", "why_not"]

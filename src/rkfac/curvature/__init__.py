"""Curvature over time: capture, running Kronecker factors, their decompositions, one block a layer."""

from rkfac.curvature.block import Block, Settings
from rkfac.curvature.decompose import RSVD, SREVD, Auto, Decomposition, Exact, Nystrom, Request
from rkfac.curvature.fisher import Bernoulli, Categorical, Gaussian, Likelihood

__all__ = [
    "RSVD",
    "SREVD",
    "Auto",
    "Bernoulli",
    "Block",
    "Categorical",
    "Decomposition",
    "Exact",
    "Gaussian",
    "Likelihood",
    "Nystrom",
    "Request",
    "Settings",
]

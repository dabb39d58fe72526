"""Randomized K-FAC optimizers for PyTorch."""

from rkfac import linalg, schedules, theory
from rkfac.curvature import (
    RSVD,
    SREVD,
    Auto,
    Bernoulli,
    Categorical,
    Exact,
    Gaussian,
    Nystrom,
)
from rkfac.optim import (
    KFAC,
    RSKFAC,
    SENG,
    SREKFAC,
    LayerReport,
    LevenbergMarquardt,
    Spectra,
    classical_defaults,
    paper_defaults,
    paper_schedules,
    recipe,
    seng_defaults,
)

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "RSKFAC",
    "RSVD",
    "SENG",
    "SREKFAC",
    "SREVD",
    "Auto",
    "Bernoulli",
    "Categorical",
    "Exact",
    "Gaussian",
    "LayerReport",
    "LevenbergMarquardt",
    "Nystrom",
    "Spectra",
    "classical_defaults",
    "linalg",
    "paper_defaults",
    "paper_schedules",
    "recipe",
    "schedules",
    "seng_defaults",
    "theory",
]

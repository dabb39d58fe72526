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
    BKFAC,
    EKFAC,
    KFAC,
    KLDWRM,
    RSKFAC,
    SKFAC,
    SREKFAC,
    LayerReport,
    LevenbergMarquardt,
    Spectra,
    classical_defaults,
    kld_wrm_defaults,
    paper_defaults,
    paper_schedules,
    recipe,
)

__version__ = "0.1.0"

__all__ = [
    "BKFAC",
    "EKFAC",
    "KFAC",
    "KLDWRM",
    "RSKFAC",
    "RSVD",
    "SKFAC",
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
    "kld_wrm_defaults",
    "linalg",
    "paper_defaults",
    "paper_schedules",
    "recipe",
    "schedules",
    "theory",
]

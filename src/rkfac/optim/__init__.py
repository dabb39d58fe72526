"""The optimizers: torch.optim.Optimizer shells around blocks of curvature."""

from rkfac.optim.adaptive import LevenbergMarquardt
from rkfac.optim.kfac import KFAC, RSKFAC, SREKFAC
from rkfac.optim.kldwrm import KLDWRM
from rkfac.optim.presets import classical_defaults, kld_wrm_defaults, paper_defaults, paper_schedules, recipe
from rkfac.optim.report import LayerReport, Spectra

__all__ = [
    "KFAC",
    "KLDWRM",
    "RSKFAC",
    "SREKFAC",
    "LayerReport",
    "LevenbergMarquardt",
    "Spectra",
    "classical_defaults",
    "kld_wrm_defaults",
    "paper_defaults",
    "paper_schedules",
    "recipe",
]

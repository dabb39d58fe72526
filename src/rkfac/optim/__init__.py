"""The optimizers: torch.optim.Optimizer shells around blocks of curvature."""

from rkfac.optim.adaptive import LevenbergMarquardt
from rkfac.optim.ekfac import EKFAC
from rkfac.optim.kfac import KFAC, RSKFAC, SREKFAC
from rkfac.optim.presets import classical_defaults, paper_defaults, paper_schedules, recipe
from rkfac.optim.report import LayerReport, Spectra

__all__ = [
    "EKFAC",
    "KFAC",
    "RSKFAC",
    "SREKFAC",
    "LayerReport",
    "LevenbergMarquardt",
    "Spectra",
    "classical_defaults",
    "paper_defaults",
    "paper_schedules",
    "recipe",
]

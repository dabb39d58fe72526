"""The optimizers: torch.optim.Optimizer shells around blocks of curvature."""

from rkfac.optim.adaptive import LevenbergMarquardt
from rkfac.optim.kfac import KFAC, RSKFAC, SREKFAC
from rkfac.optim.presets import classical_defaults, paper_defaults, paper_schedules, recipe, seng_defaults
from rkfac.optim.report import LayerReport, Spectra
from rkfac.optim.seng import SENG

__all__ = [
    "KFAC",
    "RSKFAC",
    "SENG",
    "SREKFAC",
    "LayerReport",
    "LevenbergMarquardt",
    "Spectra",
    "classical_defaults",
    "paper_defaults",
    "paper_schedules",
    "recipe",
    "seng_defaults",
]

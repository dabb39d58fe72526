"""The optimizers: torch.optim.Optimizer shells around blocks of curvature."""

from rkfac.optim.adaptive import LevenbergMarquardt
from rkfac.optim.advice import Advice, Remark
from rkfac.optim.bkfac import BKFAC
from rkfac.optim.bound import for_model, unwrap
from rkfac.optim.ekfac import EKFAC
from rkfac.optim.fit import fit_curvature
from rkfac.optim.kfac import KFAC, RSKFAC, SREKFAC
from rkfac.optim.kldwrm import KLDWRM
from rkfac.optim.presets import (
    classical_defaults,
    kld_wrm_defaults,
    paper_defaults,
    paper_schedules,
    recipe,
    seng_defaults,
)
from rkfac.optim.report import Factors, LayerReport, Report, Spectra
from rkfac.optim.seng import SENG
from rkfac.optim.skfac import SKFAC
from rkfac.optim.wake import InnerSteps

__all__ = [
    "BKFAC",
    "EKFAC",
    "KFAC",
    "KLDWRM",
    "RSKFAC",
    "SENG",
    "SKFAC",
    "SREKFAC",
    "Advice",
    "Factors",
    "InnerSteps",
    "LayerReport",
    "LevenbergMarquardt",
    "Remark",
    "Report",
    "Spectra",
    "classical_defaults",
    "fit_curvature",
    "for_model",
    "kld_wrm_defaults",
    "paper_defaults",
    "paper_schedules",
    "recipe",
    "seng_defaults",
    "unwrap",
]

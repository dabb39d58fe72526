"""Low-rank linear algebra of symmetric positive semi-definite matrices: pure functions and frozen values over tensors."""

from rkfac.linalg.checks import DecompositionError
from rkfac.linalg.energies import Energies
from rkfac.linalg.exact import eigh, of_columns
from rkfac.linalg.host import Number, Truth, add_multiple, at_once, kept, number, ratio, root, size_of
from rkfac.linalg.intact import Intact
from rkfac.linalg.kronecker import MEASURED, Preconditioner, Seer, Solution, inverses, preconditioner
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.multipliers import Diagonal, Multipliers, factored, product
from rkfac.linalg.online import correct, online_update
from rkfac.linalg.orthonormal import orthonormal
from rkfac.linalg.parts import Corrected, Itself, Part, Terms, Whole, shares_memory
from rkfac.linalg.persample import Everything, Formed, Grid, Outer, Places, Rows, Sample, Woodbury, woodbury
from rkfac.linalg.rank import adaptive, inverse_error, probe_error, sufficient_rank, trace_error
from rkfac.linalg.rowwise import Rowwise
from rkfac.linalg.scaling import SAFE, peak, unit_of
from rkfac.linalg.shadow import AGREEMENT, Modes, Shadow
from rkfac.linalg.sketch import nystrom, rsvd, srevd
from rkfac.linalg.spectral import Spectral, products, spectral

__all__ = [
    "AGREEMENT",
    "MEASURED",
    "SAFE",
    "Corrected",
    "DecompositionError",
    "Diagonal",
    "Energies",
    "Everything",
    "Formed",
    "Grid",
    "Intact",
    "Itself",
    "LowRank",
    "Modes",
    "Multipliers",
    "Number",
    "Outer",
    "Part",
    "Places",
    "Preconditioner",
    "Rows",
    "Rowwise",
    "Sample",
    "Seer",
    "Shadow",
    "Solution",
    "Spectral",
    "Terms",
    "Truth",
    "Whole",
    "Woodbury",
    "adaptive",
    "add_multiple",
    "at_once",
    "correct",
    "eigh",
    "factored",
    "inverse_error",
    "inverses",
    "kept",
    "number",
    "nystrom",
    "of_columns",
    "online_update",
    "orthonormal",
    "peak",
    "preconditioner",
    "probe_error",
    "product",
    "products",
    "ratio",
    "root",
    "rsvd",
    "shares_memory",
    "size_of",
    "spectral",
    "srevd",
    "sufficient_rank",
    "trace_error",
    "unit_of",
    "woodbury",
]

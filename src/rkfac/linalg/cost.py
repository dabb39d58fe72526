"""Seconds of a decomposition by a fixed model, so that a choice by cost is the same in every run and on every process.

Timing the machine at hand would choose a little better and make a resumed run another run. The constants were measured in
float32 on one core of a server CPU (eigh: 3.2 ms at d = 256, 19 ms at 512, 140 ms at 1024; a product with 256 columns:
104 ms at d = 4096; an SVD of 256 x 256: 6.7 ms); only their ratios matter. A damped inverse by Cholesky would be cheaper
still, but dampings, grafts and reports all want eigenpairs.
"""

from __future__ import annotations


def eigh_seconds(d: int) -> float:
    """The exact eigendecomposition of a d x d matrix."""
    return 2e-4 + 1.45e-10 * d**3


def sketch_seconds(d: int, width: int, power_iterations: int) -> float:
    """A sketch with `width` columns: products with the matrix, thin QRs, the small problem, and what calls cost at least."""
    products = (power_iterations + 1) * 2 * d**2 * width
    return 2e-3 + 1.2e-11 * products + (power_iterations + 2) * 6e-11 * d * width**2 + 4e-10 * width**3


def exact_is_cheaper(d: int, width: int, power_iterations: int) -> bool:
    """Whether to decompose exactly instead of sketching with `width` columns."""
    return width >= d or eigh_seconds(d) <= sketch_seconds(d, width, power_iterations)

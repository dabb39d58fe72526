"""How many modes an exponentially averaged Kronecker factor has: at worst (Proposition 3.1), and as is to be expected."""

from rkfac.theory.bound import retained_modes
from rkfac.theory.spectrum import effective_samples, expected_modes, expected_spectrum

__all__ = ["effective_samples", "expected_modes", "expected_spectrum", "retained_modes"]

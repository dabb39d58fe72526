"""How fast the spectrum of an exponentially averaged Kronecker factor must decay (Proposition 3.1)."""

from __future__ import annotations

import math


def retained_modes(
    rho: float = 0.95, n: int = 256, d: int | None = None, alpha: float = 0.1, epsilon: float = 0.03
) -> int:
    """Bound on the number of eigenvalues above epsilon * lambda_max: min(ceil(log(alpha epsilon) / log(rho)) n, d).

    `rho` is the decay of the average, `n` the columns a batch adds (the batch size for Linear layers), `d` the layer's
    width (None: unlimited), `alpha` the assumed ratio of lambda_max to the largest squared singular value of a batch.
    """
    for argument, value in (("rho", rho), ("alpha", alpha), ("epsilon", epsilon)):
        if not 0 < value < 1:
            raise ValueError(f"{argument} must lie strictly between 0 and 1, got {value}")
    if n < 1 or (d is not None and d < 1):
        raise ValueError(f"n and d must be positive, got n={n}, d={d}")
    modes = math.ceil(math.log(alpha * epsilon) / math.log(rho)) * n
    return modes if d is None else min(modes, d)

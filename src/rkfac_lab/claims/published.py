"""What the paper and its published logs say: Table 1, and test accuracies of the first epochs."""

from __future__ import annotations

Spread = tuple[float, float]  # mean and standard deviation

# Seconds to 90, 91.5 and 92 %, of an epoch, runs of 10 that hit 92 %, epochs to it.
TABLE_1: dict[str, tuple[Spread, Spread, Spread, Spread, int, Spread]] = {
    "K-FAC": ((1449, 8.7), (1971, 225), (2680, 636), (75.5, 3.4), 5, (35.4, 8.3)),
    "RS-KFAC": ((445.8, 10.9), (600.7, 4.9), (732.6, 153.1), (32.6, 0.9), 10, (23.0, 4.7)),
    "SRE-KFAC": ((439.4, 28.5), (582.2, 24.1), (785.3, 155.6), (30.0, 0.4), 7, (26.3, 5.1)),
    "SENG": ((673.6, 34.4), (693.2, 28.2), (718.1, 26.0), (16.6, 0.4), 10, (43.3, 0.9)),
}

# How many runs the published logs hold, of the first epochs.
RUNS = {"RS-KFAC": 9, "SRE-KFAC": 4, "K-FAC": 5}

# Test accuracy in per cent after each of the first epochs: mean, smallest, largest over the published runs.
FIRST_EPOCHS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "RS-KFAC": (
        (33.29, 26.86, 39.25),
        (48.86, 42.18, 57.29),
        (53.15, 37.18, 61.55),
        (59.82, 50.07, 69.41),
        (65.72, 58.22, 72.74),
    ),
    "SRE-KFAC": (
        (32.38, 30.81, 34.79),
        (44.26, 32.93, 56.05),
        (57.45, 49.49, 61.49),
        (63.3, 60.73, 65.74),
        (62.37, 54.16, 68.25),
    ),
    "K-FAC": (
        (45.92, 39.38, 50.06),
        (51.48, 45.53, 57.35),
        (63.0, 60.52, 67.05),
        (60.8, 56.21, 63.86),
        (62.27, 57.33, 72.18),
    ),
}

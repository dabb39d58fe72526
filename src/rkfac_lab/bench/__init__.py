"""Benchmarks: contestants interleaved in one run, reported as ratios."""

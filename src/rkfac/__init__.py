"""Randomized K-FAC optimizers for PyTorch."""

"""Readers of the workloads' data; nothing here downloads or executes anything by itself."""

from __future__ import annotations

from .base import Dataset, Sources, folders

__all__ = ["Dataset", "Sources", "folders"]

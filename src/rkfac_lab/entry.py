"""Where the `rkfac` command starts: says what is missing when the laboratory's dependencies are not installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from rkfac_lab import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rkfac"):
            raise
        sys.exit(f"the rkfac command needs {error.name!r}, which is not installed: pip install 'rkfac[lab]'")
    cli.main()

"""The `rkfac` command: argument parsing only; every command's work lives in the room of its name."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks, printed as ratios measured in one run.")
app.add_typer(bench, name="bench")


@app.callback()
def root() -> None:
    """Second-order training: compare optimizers, repeat the paper's experiments, measure."""


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

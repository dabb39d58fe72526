"""How the command is called: its help, options that may stand anywhere, and mistakes in one sentence."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

ABOUT = """Second-order training for PyTorch: try rkfac's optimizers beside SGD and AdamW, repeat the paper's
experiments, measure, and look at a training script of your own.

\b
First steps:
  rkfac demo                     does rs-kfac arrive sooner than SGD and AdamW with their own numbers? (2 minutes)
  rkfac compare digits-mlp       several optimizers on one problem: a table, curves, a page
  rkfac doctor train.py          runs your script and says in words what its rkfac optimizer is doing
"""

END = "Workloads are your own, too: module:NAME. Pages: README.md and docs/ of the source; rkfac COMMAND --help for a command."

ANYWHERE = ("--json", "--quiet")  # options of the command as a whole, wherever they stand


class Help(TyperGroup):
    """Help that also lists the workloads, which are only read when somebody asks."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As always, then the workloads."""
        super().format_help(ctx, formatter)
        from rkfac_lab.workloads import WORKLOADS

        width = max(map(len, WORKLOADS))
        formatter.write("\nWorkloads:\n")
        for name, workload in WORKLOADS.items():
            formatter.write(f"  {name:{width}}  {workload.about}\n")
        formatter.write(f"\n{END}\n")


def versions() -> dict[str, str]:
    """What a report of a mistake should begin with."""
    import torch

    import rkfac

    return {"rkfac": rkfac.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def hoisted(words: Sequence[str]) -> list[str]:
    """The command's own options first, wherever they stood; what follows a lone -- is somebody else's."""
    end = words.index("--") if "--" in words else len(words)
    mine, rest = words[:end], words[end:]
    return [*(w for w in mine if w in ANYWHERE), *(w for w in mine if w not in ANYWHERE), *rest]


# The base of what is said of wrong arguments, wherever this version of typer keeps it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def sentence(error: Any) -> str:
    """What is wrong with the arguments, in one sentence, and where to look for what is right."""
    told = " ".join(str(error.format_message()).split()).rstrip(".").partition(", unable to parse")[0]
    told = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", told)
    where = error.ctx.command_path if error.ctx is not None else "rkfac"
    return f"{told}{_example(getattr(error, 'param', None))}; `{where} --help` shows what is possible."


def _example(parameter: Any) -> str:
    """Of what is right, where a parameter has a number by default."""
    default, shown = getattr(parameter, "default", None), str(getattr(parameter, "show_default", ""))
    number = isinstance(default, int | float) and not isinstance(default, bool)
    return f" such as {default if number else shown}" if number or shown.isdecimal() else ""


def is_question(error: Any) -> bool:
    """Whether a command was called without anything and shows its help."""
    return type(error).__name__ == "NoArgsIsHelpError"

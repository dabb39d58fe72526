"""What torchrun starts for the tests: one command after another in the same processes, since starting them is what costs.

    torchrun --nproc-per-node 2 errands.py COMMANDS.json ANSWERS

COMMANDS is a list of lists of arguments; ANSWERS.RANK.json gets exit code, output and errors of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from rkfac_lab import cli, joining
from rkfac_lab.errors import CrashError, LabError


def answer(arguments: list[str]) -> tuple[int, str, str]:
    sys.argv = ["rkfac", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.app()
        except SystemExit as end:
            code = int(end.code or 0)
        except LabError as error:
            code = 1 if isinstance(error, CrashError) else 2
            print(f"rkfac: {error}", file=err)
    return code, out.getvalue(), err.getvalue()


def main() -> None:
    commands, answers = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    with joining.joined() as together:
        found = [answer(arguments) for arguments in commands]
        Path(f"{answers}.{together.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

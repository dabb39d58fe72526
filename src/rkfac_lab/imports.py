"""What `module:NAME` means: code of the user's own, imported when it is asked for. Importing a module runs it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from .errors import LabError, one_line, unknown


def named(kind: str, name: str, place: str) -> Any:
    """What the module and name in `place` lead to; `kind` and `name` say in refusals what it was wanted for."""
    module_name, _, attribute = place.partition(":")
    if not module_name or not attribute:
        raise LabError(f"The {kind} {name} is not of the form module:NAME; write both.")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a file lying there must not take an installed package's place
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LabError(f"The {kind} {name} needs the module {module_name}: {error}.") from error
    except (Exception, SystemExit) as error:  # importing runs whatever the module holds
        reason = one_line(error)
        raise LabError(f"The module {module_name} of the {kind} {name} cannot be imported ({reason}).") from error
    if not hasattr(module, attribute):
        raise unknown(f"{kind} in {module_name} named", attribute, (n for n in dir(module) if not n.startswith("_")))
    return getattr(module, attribute)

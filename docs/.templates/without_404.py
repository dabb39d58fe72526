"""No 404.html: its links begin at the root of a server, and are dead on a disk and below any other address."""

from __future__ import annotations

from typing import Any


def on_config(config: Any) -> None:
    """The theme would make one."""
    config.theme.static_templates.discard("404.html")

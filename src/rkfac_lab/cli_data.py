"""`rkfac data`: argument parsing only; the work is done in `data`."""

from __future__ import annotations

from typing import Annotated

import typer

from rkfac_lab import speech

data = typer.Typer(no_args_is_help=True, help="Datasets: which are here, and fetch one.", rich_markup_mode=None)


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fashion-mnist, cifar10 or cifar10-python.")],
    data_dir: Annotated[str | None, typer.Option(help="Where to put it; else RKFAC_DATA, then ./data.")] = None,
) -> None:
    """Download a dataset from its official place; run it again to continue a broken download."""
    from rkfac_lab.data import Sources, download, folders

    place = download.get(name, folders(Sources(data_dir))[0])
    speech.say(f"{name} is in {place}")
    speech.result({"name": name, "folder": str(place)})


@data.command("list")
def data_list(
    data_dir: Annotated[str | None, typer.Option(help="Where to look; else RKFAC_DATA, then ./data.")] = None,
) -> None:
    """Which datasets are here, and how to get the others."""
    from rkfac_lab.data import Sources, catalogue

    entries = list(catalogue.entries(Sources(data_dir)))
    for entry in entries:
        speech.say(str(entry))
    speech.result([entry._asdict() for entry in entries])

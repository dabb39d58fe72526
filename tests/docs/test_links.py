"""Links and pictures of all pages lead somewhere, and every public name is in the reference."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import rkfac

from .pages import DOCS, PAGES, name_of

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub and the site do it, and entries of the reference."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).strip() for title in titles)
    return {re.sub(r"\s+", "-", title.lower()) for title in plain} | set(ENTRY.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def names_of(module: ModuleType, where: str) -> set[str]:
    """Public names of a module, those of its public modules in their place."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            n for n, v in vars(module).items() if getattr(v, "__module__", None) == where and not n.startswith("_")
        ]
    found = set()
    for name in listed:
        value = getattr(module, name)
        found |= names_of(value, f"{where}.{name}") if isinstance(value, ModuleType) else {f"{where}.{name}"}
    return found


def test_every_public_name_is_in_the_reference() -> None:
    entries = [name for page in (DOCS / "reference").glob("*.md") for name in ENTRY.findall(page.read_text())]
    assert len(entries) == len(set(entries)), "an entry stands there twice"
    public = names_of(rkfac, "rkfac")
    shared = {f"rkfac.layers.{name}" for name in rkfac.__all__}  # the same object under a shorter name
    missing = public - shared - set(entries)
    assert not missing, f"add `::: name` to a page of docs/reference for {sorted(missing)}"
    unknown = set(entries) - public - {"rkfac.optim.base.CurvatureOptimizer"}
    assert not unknown, f"docs/reference has names that are not public: {sorted(unknown)}"

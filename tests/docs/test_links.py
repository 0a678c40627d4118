"""Every link from README and docs to a file or heading of the repository leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from snippets import ROOT, pages

_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation dropped, spaces as dashes."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page if not path else (page.parent / path)
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"

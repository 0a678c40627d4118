"""The site's navigation has every page; `make docs` builds it, and fails on a broken link."""

from __future__ import annotations

import re

from snippets import ROOT, pages


def test_every_page_is_in_the_sites_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nmarkdown_ext")[0]
    docs = ROOT / "docs"
    expected = [str(page.relative_to(docs)) for page in pages() if page.is_relative_to(docs)]
    assert sorted(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)) == sorted(expected)

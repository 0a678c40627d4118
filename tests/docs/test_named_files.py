"""The map names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([^`\n]+)`")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_is_in_the_repository(page: str) -> None:
    here = {
        "/" + path.relative_to(ROOT).as_posix()
        for folder in ("rollout", "tests", "docs", "proto", "benchmarks")
        for path in (ROOT / folder).rglob("*.*")
    }
    named = [one for code in CODE.findall((ROOT / page).read_text()) for one in _paths(code)]
    assert len(named) > 10
    gone = [one for one in named if not any(path.endswith("/" + one) for path in here)]
    assert not gone, f"{page} names files that are not there: {gone}"


def _paths(code: str) -> list[str]:
    """Of `folder/file.py`, of `folder/{a,b}.py`, and of what a command runs."""
    found = []
    for word in code.split():
        if not re.fullmatch(r"[\w./{},-]+\.(py|proto|c|h)", word):
            continue
        head, brace, rest = word.partition("{")
        parts, _, tail = rest.partition("}")
        found += [head + part + tail for part in parts.split(",")] if brace else [word]
    return found

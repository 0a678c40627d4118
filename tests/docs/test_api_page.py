"""docs/api.md names every public name with the signature it has, and no other."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields

import pytest
from snippets import ROOT

import rollout

sys.path.insert(0, str(ROOT / "docs"))

import make_api

STALE = "docs/api.md is out of date: run `python docs/make_api.py`"


def skeleton(text: str) -> list[str]:
    """Headings, signatures and the first cell of each row: all that is no prose."""
    found, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        inside ^= fence
        if inside or line.startswith("#"):
            found.append(line)
        elif line.startswith("| "):
            found.append(line.split("|")[1].strip())
    return found


def test_names_and_signatures_are_those_of_the_code() -> None:
    assert skeleton(make_api.PAGE.read_text()) == skeleton(make_api.page()), STALE


def test_every_public_name_is_there() -> None:
    text = make_api.PAGE.read_text()
    headings = re.findall(r"^###? (\S+)$", text, re.MULTILINE)
    rows = re.findall(r"^\| (?:&emsp;)*`(\w+)` \|", text, re.MULTILINE)
    for name in rollout.__all__:
        assert name in headings or name in rows, f"{name}: {STALE}"
    for name in dir(rollout.Rollout):
        assert name.startswith("_") or f"Rollout.{name}" in headings, f"{name}: {STALE}"
    for name in dir(rollout.AsyncRollout):
        assert name.startswith("_") or name in rows, f"{name}: {STALE}"
    for cls in (rollout.SamplingParams, rollout.EngineConfig):
        for field in fields(cls):
            assert field.name in rows, f"{cls.__name__}.{field.name}: {STALE}"
    for heading in headings:  # and none that the code does not have
        name, _, method = heading.partition(".")
        assert name not in rollout.__all__ or not method or hasattr(getattr(rollout, name), method)


@pytest.mark.parametrize("cls", [rollout.Rollout, rollout.AsyncRollout])
def test_every_verb_says_what_it_does(cls: type) -> None:
    for name in make_api.public(cls):
        assert inspect.getdoc(inspect.getattr_static(cls, name)), f"{cls.__name__}.{name}"


def test_a_page_that_lacks_a_name_is_out_of_date() -> None:
    lacking = make_api.page().replace("| `temperature` |", "| `warmth` |")
    assert skeleton(lacking) != skeleton(make_api.page())

"""docs/models.md says of every causal model of transformers what a sweep finds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import transformers
import transformers_sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import make_models

from rollout.models.transformers_backend.own_plan import OWN

STALE = "docs/models.md is out of date: run `python docs/make_models.py --sweep`"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of models that nobody here wrote
def test_the_page_has_what_the_sweep_finds() -> None:
    assert make_models.swept_part() == make_models.swept_lists(transformers_sweep.sweep()), STALE


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_the_page_has_what_a_sweep_over_every_eighth_type_finds() -> None:
    some = tuple(name for name, _ in transformers_sweep.model_types())[::8]
    found = _lists_of_each(make_models.swept_lists(transformers_sweep.sweep(some)))
    assert sorted(found) == sorted(some)
    on_page = _lists_of_each(make_models.swept_part())
    assert {name: on_page[name] for name in some} == found, STALE


def _lists_of_each(text: str) -> dict[str, set[str]]:
    """Of each model type what the lists say in which it is."""
    lists: dict[str, set[str]] = {}
    pattern = r"^(?:\| (.*) \| \d+|\d+ (natively|by transformers)): (`.*`)"
    for row, way, names in re.findall(pattern, text, flags=re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            lists.setdefault(name, set()).add(row or way)
    return lists


def test_the_page_counts_what_it_names_and_names_every_type_of_the_installed_transformers() -> None:
    """Of an earlier sweep, too, which is not made anew here."""
    text = make_models.swept_part()
    assert f"on transformers {transformers.__version__}, at tiny size" in text
    heads = r"^\| (?:cut|by|the others).*\n\|---.*\n"
    served, cut, whole, others = re.split(heads, text, flags=re.MULTILINE)

    def named(part: str) -> list[str]:
        found: list[str] = []
        for count, names in re.findall(r"(\d+)(?: natively| by transformers)?: (`.*`)", part):
            types = re.findall(r"`([^`]+)`", names)
            assert len(types) == int(count), names
            found += types
        return sorted(found)

    every = sorted(name for name, _ in transformers_sweep.model_types())
    assert sorted(named(served) + named(others)) == every
    total, good = map(int, re.search(r"of (\d+) model types .*, (\d+) load", text).groups())
    assert (total, good) == (len(every), len(named(served)))
    [by_transformers] = re.findall(r"^(\d+ by transformers: .*)", served, flags=re.MULTILINE)
    assert sorted(named(cut) + named(whole)) == named(by_transformers)
    [over_two] = re.findall(r"^(\d+) of these over two ranks", served, flags=re.MULTILINE)
    assert int(over_two) == len(named(cut))
    ours = re.findall(
        r"^\| (?:rollout's plan|.* mended by rollout's) \| (.*) \|$", cut, flags=re.MULTILINE
    )
    assert len(named("\n".join(ours))) >= len(OWN)  # each of our plans shows


def test_the_table_is_the_registrys() -> None:
    stale = "docs/models.md is out of date: run `python docs/make_models.py`"
    swept = make_models.swept_part()
    assert make_models.PAGE.read_text() == make_models.page(swept), stale
    readme = make_models.README.read_text()
    assert readme == make_models.readme(readme, swept), stale

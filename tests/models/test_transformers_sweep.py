"""docs/models.md says of every causal model of transformers what a sweep finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers_sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import make_models


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of models that nobody here wrote
def test_the_page_has_what_the_sweep_finds() -> None:
    found = make_models.swept_lists(transformers_sweep.sweep())
    stale = "docs/models.md is out of date: run `python docs/make_models.py --sweep`"
    assert make_models.swept_part() == found, stale


def test_the_table_is_the_registrys() -> None:
    stale = "docs/models.md is out of date: run `python docs/make_models.py`"
    swept = make_models.swept_part()
    assert make_models.PAGE.read_text() == make_models.page(swept), stale
    readme = make_models.README.read_text()
    assert readme == make_models.readme(readme, swept), stale

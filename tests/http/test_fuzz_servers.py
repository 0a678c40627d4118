"""A short course of ``benchmarks/fuzz.py``: no message breaks a server, or whatever reads one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz

SECONDS = 10  # a round at the least; `make soak` goes on for ten minutes


@pytest.mark.timeout(240)
def test_whatever_is_sent_a_named_error_comes_back_and_the_tokens_stay(tmp_path: Path) -> None:
    with fuzz.started(tmp_path) as servers:
        found = fuzz.run(servers, SECONDS, start=1)
    assert found["violations"] == []
    assert found["messages"] >= 100
    assert found["answers"]["http 200"]
    assert found["answers"]["grpc OK"]
    assert found["answers"]["grpc INVALID_ARGUMENT"]

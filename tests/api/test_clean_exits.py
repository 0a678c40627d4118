"""A trainer that comes to the end of ``main`` ends with status 0, and leaves nothing behind.

ROLLOUT_TEST_EXITS: how many exits of each kind the sweep of `make more` has; a soak wants 30.
"""

from __future__ import annotations

import os

import pytest
from exits import OUTCOMES, PROMPT, TRANSPORTS, Case, exiting_trainers, variants

EXITS = int(os.environ.get("ROLLOUT_TEST_EXITS", "2"))


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    with exiting_trainers(tmp_path_factory) as trainers:
        yield trainers


def prompt_at_last(trainers, took, case) -> None:
    """A wait would show in all exits, a busy machine in some."""
    for _ in range(5):
        if min(took) < PROMPT:
            return
        took += trainers.run(case)
    assert min(took) < PROMPT, took


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [*((transport, 1) for transport in TRANSPORTS), ("broadcast", 2), ("p2p", 2)],
    ids=lambda value: {1: "plain", 2: "fsdp2"}.get(value, value),
)
def test_trainers_end_with_status_0(trainers, transport, ranks) -> None:
    took = []
    for outcome in ("committed", "failed"):
        exits = 2 if ranks == 1 and outcome == "committed" else 1
        for case in variants(transport, ranks, outcome, exits):
            took += trainers.run(case)
    prompt_at_last(trainers, took, case)


@pytest.mark.parametrize("ranks", [1, 2], ids=["plain", "fsdp2"])
def test_after_an_aborted_update_too(trainers, ranks) -> None:
    for transport in ("broadcast", "p2p"):
        trainers.run(Case(transport, ranks, "aborted"))


def test_an_engine_that_nobody_closed_ends_with_its_processes(trainers) -> None:
    trainers.run(Case("ipc", 1, "committed", embedded=2))


@pytest.mark.more
@pytest.mark.timeout(60 + 60 * EXITS)
@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("ranks", [1, 2], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way_to_end(trainers, transport, ranks, outcome) -> None:
    cases = list(variants(transport, ranks, outcome, EXITS))
    prompt_at_last(trainers, [s for case in cases for s in trainers.run(case)], cases[-1])


@pytest.mark.more
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_engine_that_nobody_closed_whatever_the_update_did(trainers, outcome) -> None:
    trainers.run(Case("ipc", 1, outcome, embedded=2))

"""Before step 1: what an update would take, from names, shapes and what was seen before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_ranks import Engine

from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.publisher import publish
from rollout.weight_sync.trainer.weight_report import preflight
from rollout.weights import TensorMeta

DEADLINE = 5.0
BUCKET = 32 << 10


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    memory = {"weights": 1000, "undo": 500}
    engine.coordinator.served = replace(engine.coordinator.served, memory=memory)
    yield engine
    engine.close()


class OnlyNames:
    """A source that says what it has, and must not be asked for it."""

    def __init__(self, weights) -> None:
        self.agreement, self.weights = Agreement(), weights

    def metadata(self):
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self.weights.items())

    def __iter__(self):
        raise AssertionError("preflight moved weights")

    def local_boxes(self):
        return []


def test_memory_on_both_sides_and_seconds_are_told_and_nothing_moves(engine, checkpoints) -> None:
    weights = checkpoints[2]
    largest = max(t.nbytes for t in weights.values())
    report = preflight(
        OnlyNames(weights), connect=lambda: engine, timeout=DEADLINE, bucket_bytes=BUCKET
    )
    assert report.equal
    assert report.num_bytes == sum(t.nbytes for t in weights.values())
    cost = report.cost
    assert cost.sender_bytes == 2 * BUCKET + largest
    assert cost.rank_bytes == 2 * BUCKET + 1000 + 500
    assert 0 < cost.seconds < 5
    assert cost.basis.startswith("no update to go by; ")


def test_the_last_full_update_says_how_long_the_next_will_take(engine, checkpoints) -> None:
    options = UpdateOptions(bucket_bytes=BUCKET, timeout=DEADLINE)
    receipt = publish(checkpoints[2], connect=lambda: engine, options=options)
    whole = preflight(OnlyNames(checkpoints[1]), connect=lambda: engine, timeout=DEADLINE).cost
    (took,) = [r for r in engine.receipts() if r.version == receipt.version]
    assert whole.seconds == pytest.approx(took.timings["total"])
    assert whole.basis.startswith(f"version {receipt.version} took ")
    engine.rollback(DEADLINE)  # says nothing of what an update takes
    assert preflight(
        OnlyNames(checkpoints[1]), connect=lambda: engine, timeout=DEADLINE
    ).cost.basis.startswith(f"version {receipt.version} took ")


def test_a_source_that_does_not_know_what_it_sends_has_no_cost(engine) -> None:
    items = iter([("model.norm.weight", torch.ones(64))])
    assert preflight(items, connect=lambda: engine, timeout=DEADLINE).cost is None

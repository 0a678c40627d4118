"""Steps through memory that engine and ranks map, in one order with the calls of the socket."""

import os
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
import torch
from engine_exec.drive_executor import generate, running

from rollout.engine.executors import settled
from rollout.engine.steps.step_ring import CALL_BYTES, SLOTS, RankSteps, StepFuture, StepRing
from rollout.engine.worker.call_queue import CallQueue
from rollout.wire.frames import encode


@pytest.fixture
def ends():
    """An engine's end and those of two ranks, in one process."""
    ring = StepRing.make(2, 1)
    assert ring is not None
    ranks = [RankSteps.join(os.dup(ring.fd), rank, 2) for rank in range(2)]
    ring.begin()
    assert ring.in_use
    assert ring.fd is None
    return ring, ranks


def call(turn, **more):
    return {"id": turn, "method": "step", "args": {}, "turn": turn, **more}


def test_every_rank_reads_every_call_and_a_full_ring_takes_no_more(ends):
    ring, ranks = ends
    for turn in range(1, SLOTS + 1):
        assert ring.put(turn, call(turn), {"rows": torch.arange(turn)})
    assert not ring.put(SLOTS + 1, call(SLOTS + 1), {})
    for turn in range(1, SLOTS + 1):
        assert ranks[0].take(turn)[1]["rows"].tolist() == list(range(turn))
    assert not ring.put(SLOTS + 1, call(SLOTS + 1), {})  # the other one has not read
    assert ranks[1].take(1)[1]["rows"].tolist() == [0]
    assert ring.put(SLOTS + 1, call(SLOTS + 1), {})


def test_what_a_call_has_again_is_not_written_again_and_stays_as_it_was(ends):
    ring, (rank, other) = ends
    same, first, second = torch.arange(5), torch.ones(3), torch.zeros(3)
    assert ring.put(1, call(1), {"same": same, "moves": first})
    assert ring.put(2, call(2), {"same": same, "moves": second})
    assert ring.put(3, call(3), {"moves": second})
    assert ring.put(4, call(4), {"same": same.clone(), "moves": second})
    for each in (rank, other):
        assert "again" not in each.take(1)[0]
        header, tensors = each.take(2)
        assert header["again"] == ["same"]
        assert tensors["same"].tolist() == [0, 1, 2, 3, 4]
        assert tensors["moves"].tolist() == [0, 0, 0]
        assert list(each.take(3)[1]) == ["moves"]
        assert each.take(4)[0]["again"] == ["moves"]


def test_a_frame_that_is_too_long_is_for_the_socket(ends):
    ring, (rank, _) = ends
    long = {"rows": torch.zeros(CALL_BYTES, dtype=torch.uint8)}
    assert not ring.takes(long)
    assert not ring.put(1, call(1), long)
    assert rank.take(1) is None
    assert not rank.reply(encode({"id": 1, "reply": {}}, long))


def test_calls_by_both_ways_are_run_in_one_order(ends):
    ring, (rank, other) = ends
    calls = CallQueue(rank)
    got = []

    def run():
        while (frame := calls.get()) is not None:
            got.append(frame[0]["turn"])

    thread = threading.Thread(target=run)
    thread.start()
    assert ring.put(2, call(2), {})  # before the one ahead of it has come through the socket
    time.sleep(0.05)
    assert got == []
    calls.put((call(1, method="commit"), {}))
    calls.put((call(4, method=""), {}))  # one that found no memory for its tensors
    calls.put((call(6, method="sleep"), {}))
    assert ring.put(3, call(3), {})
    assert ring.put(5, call(5), {})
    deadline = time.monotonic() + 20
    while len(got) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    calls.end()
    thread.join(20)
    assert got == [1, 2, 3, 5, 6]
    assert other.take(2) is not None


def test_where_a_rank_has_no_such_memory_the_others_reply_through_their_sockets():
    ring = StepRing.make(2, 1)
    rank = RankSteps.join(os.dup(ring.fd), 0, 2)
    ring.begin()
    assert not ring.in_use
    assert not rank.reply(encode({"id": 1, "reply": {}}))


def test_a_rank_that_has_nothing_to_do_spins_once_and_sleeps_from_then_on(ends):
    ring, (rank, _) = ends
    spins = []
    rank._spin, rank._memory.wait = 7, lambda at, rung, spin, seconds: spins.append(spin)
    for _ in range(3):
        rank.wait(rank.rung)
    assert ring.put(1, call(1), {})
    for _ in range(2):
        rank.wait(rank.rung)
    assert spins == [7, 0, 0, 7, 0]


def test_counters_wrap(ends):
    ring, ranks = ends
    ring._written = 0xFFFFFFFE
    ring._memory.set(8, 0xFFFFFFFE)
    for rank in ranks:
        rank._read = 0xFFFFFFFE
        rank._memory.set(64 * (1 + rank._rank) + 12, 0xFFFFFFFE)
    for turn in range(1, 9):
        assert ring.put(turn, call(turn), {"turn": torch.tensor([turn])})
        for rank in ranks:
            assert rank.take(turn)[1]["turn"].item() == turn


def test_who_waits_for_a_reply_reads_it_and_a_wait_ends_at_its_deadline(ends):
    ring, (rank, _) = ends
    future = StepFuture(
        lambda done, timeout: ring.wait_until(done, timeout, lambda _, f: future.set_result(f))
    )
    with pytest.raises(FutureTimeout):
        future.result(0.01)
    assert not settled([future], 0.01)
    threading.Timer(0.1, rank.reply, [encode({"id": 1, "reply": {"version": 7}})]).start()
    assert future.result(20)[0]["reply"] == {"version": 7}
    assert settled([future], 0)


def test_a_process_replies_to_steps_through_the_memory_alone(tiny):
    with running(tiny[0], executor="multiprocess") as executor:
        ring, sent = executor._ring, []
        executor._links[0].send = sent.append
        executor._links[0]._on_reply = lambda: sent.append("a reply")
        generate(executor, [[1, 2, 3], [4, 5]], 6)
        assert ring._written == 6
        assert sent == []
        del executor._links[0].send


def test_a_cpu_that_has_no_core_to_spare_does_not_spin():
    for busy, spins in ((1 << 20, False), (0, True)):
        ring = StepRing.make(1, busy)
        assert (ring._spin > 0) is spins
        ring.close()

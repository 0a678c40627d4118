"""Members report what other fronts sent them: prompts find their beginnings, and loads spread."""

import time

import numpy as np
import pytest
from fleet_front import Front, OneMore
from shared_engines import eventually, standing_still

from rollout.engine.requests.recent_beginnings import ENTRY, KEPT, MOST, RecentBeginnings
from rollout.errors import InvalidRequest, TransferFailed
from rollout.fleet.calls.beginning import CHUNK_TOKENS, Beginning
from rollout.fleet.calls.call import FleetCall
from rollout.fleet.calls.reports import entries_of
from rollout.fleet.calls.router import Router
from rollout.generation import SamplingParams
from rollout.weight_sync.protocol.membership import Report
from rollout.wire.codec import from_json, to_json

ONE = {"max_tokens": 1, "temperature": 0.0}
LONG = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True, "group_id": "g"}
IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}
WAIT = 60.0  # seconds: for hangs
CONVERSATIONS, TURNS = 9, 4


def digests(*numbers):
    return np.array(numbers, "<u8").tobytes()


def report(**fields):
    row = {"epoch": 1, "fleet": 1, "state": "running", "version": 0, "calls": 0, "running": 0}
    return Report(**row, waiting=0, kv_usage=0.0, **fields)


def test_a_member_tells_each_front_what_is_new_to_it_and_no_more_than_fits():
    ring = RecentBeginnings()
    assert ring.since(0) == (0, b"")
    ring.add(digests(1, 2, 3, 4, 5))
    serial, packed = ring.since(0)
    assert np.frombuffer(packed, ENTRY)["digest"].tolist() == [1, 2, 3, 4, 5]
    ring.add(digests(1, 2, 3, 4, 5, 6, 7))  # a turn later; the last ones count anew
    serial, packed = ring.since(serial)
    entries = np.frombuffer(packed, ENTRY)
    assert entries["digest"].tolist() == [5, 6, 7]
    assert (entries["age"] >= 0).all()
    assert ring.since(serial) == (serial, b"")
    for first in range(1000, 1000 + KEPT + 500, 500):
        ring.add(digests(*range(first, first + 500)))
    found = set()
    for _ in range(KEPT // MOST + 1):
        serial, packed = ring.since(serial)
        assert len(packed) <= MOST * ENTRY.itemsize
        found |= set(np.frombuffer(packed, ENTRY)["digest"].tolist())
    assert len(found) == KEPT  # what is older was overwritten
    assert len(ring._serials) == KEPT
    assert ring.since(serial) == (serial, b"")


@pytest.mark.parametrize("packed", [b"1234567", digests(*range(1025))])
def test_what_is_no_digests_is_refused(packed):
    with pytest.raises(InvalidRequest, match="no digests"):
        RecentBeginnings().add(packed)


def test_a_report_is_checked_before_it_is_believed():
    entries = np.zeros(2, ENTRY)
    sent = to_json(report(serial=2, beginnings=entries.tobytes()))
    assert len(entries_of(from_json(Report, sent))) == 2
    with pytest.raises(TransferFailed, match="no whole digests"):
        entries_of(report(beginnings=b"12345"))
    for age in (-1.0, float("nan"), float("inf")):
        entries["age"] = age
        with pytest.raises(TransferFailed, match="yet to come"):
            entries_of(report(beginnings=entries.tobytes()))
    with pytest.raises(TransferFailed, match="Report"):
        from_json(Report, to_json(report(beginnings=bytes(12 * (MOST + 1)))))


def test_of_what_was_sent_by_several_fronts_the_newest_counts():
    ours = Router()
    prompt, other = Beginning.of(list(range(4 * CHUNK_TOKENS)), "s", "g"), Beginning.of([1], "s")
    now = time.monotonic()
    ours.learn("b", [(key, now - 2.0) for key in prompt.keys])
    assert ours.place(prompt, IDLE) == "b"  # and again, now
    ours.learn("c", [(key, now - 1.0) for key in prompt.keys])
    assert ours.place(prompt, IDLE) == ours.place(other, IDLE) == "b"
    ours.learn("c", [(key, time.monotonic()) for key in prompt.keys])
    assert ours.place(prompt, IDLE) == ours.place(other, IDLE) == "c"
    together = Beginning.of([7], None, "g")
    assert ours.place(together, {**IDLE, "c": 50.0}) == "c"
    assert ours.place(Beginning.of([7]), {**IDLE, "c": 50.0}) != "c"


def tokens(arm, conversation, turn):
    """Of all turns so far."""
    rng = np.random.default_rng(100 * arm + conversation)
    return rng.integers(5, 60, 64 + 32 * turn).tolist()


def know(front, prompts):
    keys = [Beginning.of(prompt).chain[-1] for prompt in prompts]
    eventually(lambda: all(key in front.backend.calls.router._known for key in keys), WAIT)


def hit_rate(arm, fronts, names, *, waits):
    """Share of tokens that later turns found in caches, each turn through the next of ``fronts``;
    with their first turn members got as many each, wherever hashes would have put them.
    """
    cached = asked = 0
    for turn in range(TURNS):
        front = fronts[turn % len(fronts)]
        prompts = [tokens(arm, n, turn) for n in range(CONVERSATIONS)]
        if turn == 0:
            for n, prompt in enumerate(prompts):
                keys = Beginning.of(prompt).keys
                had = [(key, time.monotonic()) for key in keys]
                front.backend.calls.router.learn(names[n % len(names)], had)
        outputs = front.rollout.generate(prompts, ONE)
        if turn:
            cached += sum(output.num_cached_tokens for output in outputs)
            asked += sum(map(len, prompts))
        if waits:
            [know(one, prompts) for one in fronts]
    return cached / asked


def test_a_conversation_finds_its_beginning_and_loads_are_seen_through_whichever_front(
    engines, tmp_path, monkeypatch
):
    front = Front(tmp_path / "record", engines, lease=5.0)
    front.fleet.wait_serving(3, WAIT)
    other = OneMore(front.rollout.address)
    try:
        other.rollout.generate([[1]], ONE)
        alone = hit_rate(1, [front], front.names, waits=False)
        both = hit_rate(2, [front, other], front.names, waits=True)
        assert both == alone > 0.6

        streams = standing_still(
            lambda: [_begun(front.rollout.stream([8, n], LONG)) for n in range(6)],
            front.rollout, 6,
        )  # fmt: skip
        [busy] = [link.name for link in front.fleet.links() if link.calls]
        told = next(link for link in other.fleet.links() if link.name == busy)
        eventually(lambda: told.others == 6, WAIT)
        call = FleetCall(
            prompts=[[n, n + 1] for n in range(5, 25)], params=[SamplingParams()] * 20,
            request_ids=list(map(str, range(20))), stream=False,
        )  # fmt: skip
        shares = other.backend.calls._shares(call, range(20), set())
        assert len(shares.pop(busy, [])) <= 4
        assert len(shares) == 2
        front.rollout.resume_generation()
        [list(stream) for stream in streams]
        eventually(lambda: told.others == 0, WAIT)

        monkeypatch.setattr(other.backend.reports, "_others_route", lambda: False)
        monkeypatch.setattr(front.backend.reports, "_others_route", lambda: False)
        # By how much depends on where hashes of the members' ports put conversations.
        assert hit_rate(3, [front, other], front.names, waits=False) < both
    finally:
        other.close()
        front.close()


def _begun(stream):
    next(stream)
    return stream

"""Updates of a fleet that meet, that come again, and that its end overtakes."""

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fleet_front import LEASE, Front

from rollout.engine.updates.verbs.repeats import Caller
from rollout.errors import EngineClosed, VersionConflict
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.updates.transaction import Transaction
from rollout.fleet.updates.update_log import UpdateLog
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish

WAIT = 30.0  # seconds: for hangs


class Named:
    """A link to a front, whose update has an id that is given."""

    def __init__(self, front, update_id):
        self._backend, self._id = front.backend, update_id

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def open(self):
        channel = self._backend.open()
        begin = channel.begin
        channel.begin = lambda request: begin(replace(request, update_id=self._id))
        return channel


def sent(front, source, update_id):
    options = UpdateOptions(timeout=WAIT, transport="inline")
    return publish(source, connect=lambda: Named(front, update_id), options=options)


def test_updates_that_meet_take_turns_and_one_that_comes_again_is_answered_by_what_it_did(
    engines, tmp_path, trained
):
    front = Front(tmp_path / "record", engines)
    front.fleet.wait_serving(3, WAIT)
    reached, go_on, write = threading.Event(), threading.Event(), front.fleet.record.write

    def slow(promise):
        reached.set()
        assert go_on.wait(WAIT)
        write(promise)

    front.fleet.record.write = slow
    try:
        with ThreadPoolExecutor(3) as pool:
            try:
                first = pool.submit(sent, front, trained, "meets-1")
                assert reached.wait(WAIT)
                assert front.rollout.weight_info().state == "committing"
                again = pool.submit(sent, front, trained, "meets-1")
                other = pool.submit(sent, front, trained, "meets-2")
                with pytest.raises(TimeoutError):
                    other.result(0.3)
            finally:
                go_on.set()
            assert first.result(WAIT) == again.result(WAIT)
            assert (first.result().version, other.result(WAIT).version) == (1, 2)
        different = copy.deepcopy(trained)
        with torch.no_grad():
            different.lm_head.weight.mul_(2)
        with pytest.raises(VersionConflict, match="other weights"):
            sent(front, different, "meets-1")
        info = front.rollout.weight_info()
        assert (info.state, info.version, info.last_update_id) == ("idle", 2, "meets-2")
    finally:
        front.close()
    front = Front(tmp_path / "record", engines)  # which has no receipts
    try:
        front.fleet.wait_serving(3, WAIT)
        assert front.rollout.weight_info().last_update_id == "meets-2"
        with pytest.raises(VersionConflict, match="meets-2 is already live as version 2"):
            sent(front, trained, "meets-2")
        with pytest.raises(VersionConflict, match="meets-1 has been committed here already"):
            sent(front, trained, "meets-1")
        assert front.fleet.version == 2
        assert [engine.weight_version for engine in engines] == [2, 2, 2]
        assert len(front.fleet.serving()) == 3
    finally:
        front.close()


def test_a_front_that_has_started_anew_knows_a_trainers_update_that_is_live(
    engines, tmp_path, trained, monkeypatch
):
    for update_id in ("of-before-1", "of-before-2"):
        front = Front(tmp_path / "record", engines)
        try:
            front.fleet.wait_serving(3, WAIT)
            done = sent(front, trained, update_id)
        finally:
            front.close()
    front = Front(tmp_path / "record", engines)
    try:
        front.fleet.wait_serving(3, WAIT)
        verbs, caller = front.backend.verbs, Caller(update_id="of-before-2")
        again = verbs.finish(caller=caller)
        assert (again.version, again.epoch, again.digest) == (2, front.fleet.epoch, done.digest)
        with pytest.raises(VersionConflict, match="of-before-2 is live as version 2"):
            verbs.start(caller=caller)
        with pytest.raises(VersionConflict, match="of-before-1 was not started here"):
            verbs.finish(caller=Caller(update_id="of-before-1"))
    finally:
        front.close()
    monkeypatch.setattr(RolloutClient, "receipts", lambda client: ())
    front = Front(tmp_path / "record", engines)
    try:
        front.fleet.wait_serving(3, WAIT)
        with pytest.raises(VersionConflict, match=r"live as version 2; no member .* its receipt"):
            front.backend.verbs.finish(caller=caller)
    finally:
        front.close()


def test_a_fleet_that_closes_answers_whoever_waits_for_its_commit(tmp_path):
    fleet = Fleet(Record(tmp_path / "record", LEASE), lease=LEASE)
    transaction = Transaction(fleet, UpdateLog())
    transaction.update_id, transaction.timeout = "closes-1", 600.0
    fleet._ended["closes-1"] = Future()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(transaction.commit, "inline")
        fleet.close()
        with pytest.raises(EngineClosed, match="if its record says so"):
            asked.result(WAIT)
    with pytest.raises(EngineClosed):
        fleet.begin("closes-2", None, 1.0)

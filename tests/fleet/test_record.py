"""What a coordinator has promised survives it."""

import contextlib
import sqlite3
from dataclasses import replace

import pytest

from rollout.errors import ConfigError, UpdateInProgress
from rollout.fleet.coordination.held import Held
from rollout.fleet.coordination.record import FILE, Record
from rollout.weight_sync.protocol.adapters import HeldAdapter


def test_a_promise_is_there_for_the_next_under_a_higher_fence(tmp_path):
    with Record(tmp_path) as record:
        assert (record.promise.fence, record.promise.version) == (1, 0)
        adapters = (HeldAdapter("math/é", 7, (1 << 64) - 2), HeldAdapter("code", 3, 0))
        promise = replace(
            record.promise, version=7, digest=(1 << 64) - 1, update_id="7", adapters=adapters,
            adapters_before=adapters[1:],
        )  # fmt: skip
        record.write(promise)
    with Record(tmp_path) as record:
        assert record.promise == replace(promise, fence=2)


def test_one_coordinator_has_a_record_at_a_time(tmp_path):
    with Record(tmp_path), pytest.raises(UpdateInProgress, match="one at a time"):
        Record(tmp_path)
    Record(tmp_path).close()


def test_a_write_that_did_not_reach_the_disk_leaves_what_was_promised(tmp_path):
    with Record(tmp_path) as record:
        before = record.promise
        pages = record._db.execute("PRAGMA page_count").fetchone()[0]
        record._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ConfigError, match=r"could not be written: .*full"):
            record.write(replace(before, version=1, update_id="x" * 100_000))
        assert record.promise == before
        record.write(replace(before, version=2))
    with Record(tmp_path) as record:
        assert record.promise.version == 2


def test_a_write_that_fails_once_the_disk_holds_it_is_a_promise(tmp_path):
    """Else a trainer is told that its update was given up, and the next coordinator commits it."""

    class FailsLate:
        def __init__(self, db):
            self.db, self.in_transaction = db, False

        def execute(self, sql, *values):
            found = self.db.execute(sql, *values)
            if sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return found

    with Record(tmp_path) as record:
        plain, promise = record._db, replace(record.promise, version=3, digest=5, update_id="3")
        record._db = FailsLate(plain)
        record.write(promise)
        assert record.promise == promise
        record._db = plain
    with Record(tmp_path) as record:
        assert record.promise.version == 3


def test_a_write_that_cannot_even_be_undone_is_refused_and_the_next_one_is_kept(tmp_path):
    class Fails:
        def __init__(self, db):
            self.db = db

        @property
        def in_transaction(self):
            return self.db.in_transaction

        def execute(self, sql, *values):
            if sql in ("COMMIT", "ROLLBACK"):
                raise sqlite3.OperationalError("disk I/O error")
            return self.db.execute(sql, *values)

    with Record(tmp_path) as record:
        plain, before = record._db, record.promise
        record._db = Fails(plain)
        with pytest.raises(ConfigError, match="could not be written: disk I/O error"):
            record.write(replace(before, version=3, update_id="3"))
        assert record.promise == before
        record._db = plain
        record.write(replace(before, version=4))
    with Record(tmp_path) as record:
        assert record.promise.version == 4


def test_what_is_no_record_is_refused_by_name(tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=FILE):
        Record(tmp_path)
    with pytest.raises(ConfigError, match="cannot be kept"):
        Record("/proc/nowhere")


def test_one_that_could_not_be_taken_over_is_let_go(tmp_path):
    """Whoever mends it needs it, however long the error is kept."""

    def change(held):
        with contextlib.closing(sqlite3.connect(tmp_path / FILE, timeout=0.0)) as db:
            db.execute("UPDATE held SET held = ?", (held,))
            db.commit()

    with Record(tmp_path) as record:
        record.hold(lambda: Held(paused=True))
    change("damaged")
    with pytest.raises(ConfigError, match="is damaged") as kept:
        Record(tmp_path)
    change('{"paused": false, "asleep": []}')
    with Record(tmp_path) as record:
        assert record.held == Held()
    assert kept.value.__traceback__ is not None


def test_a_record_of_before_adapters_is_taken_over(tmp_path):
    with Record(tmp_path) as record:
        promise = record.promise
    with sqlite3.connect(tmp_path / FILE) as db:
        for name in ("adapters", "adapters_before"):
            db.execute(f"ALTER TABLE promise DROP COLUMN {name}")
    db.close()
    with Record(tmp_path) as record:
        assert record.promise == replace(promise, fence=2)


def test_what_members_are_held_in_is_there_for_the_next(tmp_path):
    asleep = Held(paused=True, asleep=frozenset({"kv_cache"}))
    with Record(tmp_path) as record:
        assert record.held is None
        record.hold(lambda: asleep)
        record.write(replace(record.promise, version=4))
    with Record(tmp_path) as record:
        assert (record.held, record.promise.version) == (asleep, 4)
        record.hold(Held)
    with Record(tmp_path) as record:
        assert record.held == Held()


def test_a_record_of_before_holds_is_taken_over_and_a_damaged_one_is_not(tmp_path):
    Record(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DROP TABLE held")
    db.close()
    with Record(tmp_path) as record:
        assert record.held is None
        record.hold(Held)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE held SET held = '[]'")
    db.close()
    with pytest.raises(ConfigError, match="damaged"):
        Record(tmp_path)

"""What a coordinator has promised, on a local disk, and what it holds members in: a row of each."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout.errors import ConfigError, UpdateInProgress
from rollout.fleet.coordination.actions import MAX_LEASE, Promise
from rollout.fleet.coordination.held import Held
from rollout.weight_sync.protocol.adapters import HeldAdapter

FILE = "fleet.sqlite"
_COLUMNS = ", ".join(f.name for f in fields(Promise))


class Record:
    """The record in ``directory``, taken over: its fence is one above that of whoever had it.

    SQLite with ``synchronous=FULL``; the file's exclusive lock is held as long as this is open, so
    that no two coordinators of one record can write. ``lease``: the longest that this one will
    grant; ``earlier``: that earlier ones did, 0 for none. Raises ``UpdateInProgress`` where another
    process has it, ``ConfigError`` where it cannot be kept there. Promises are written by one
    thread at a time. ``held``: what members are held in; None where nobody has written that.
    """

    def __init__(self, directory: str | Path, lease: float = 0.0) -> None:
        path = Path(directory) / FILE
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=0.0, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.DatabaseError) as error:
            raise ConfigError(f"the fleet's record {path} cannot be kept: {error}") from error
        try:
            self._take_over(path, lease)
        except BaseException:
            self._db.close()
            raise

    def _take_over(self, path: Path, lease: float) -> None:
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=DELETE", "synchronous=FULL"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.execute("BEGIN IMMEDIATE")
            columns = f"id INTEGER PRIMARY KEY, {_COLUMNS}"
            self._db.execute(f"CREATE TABLE IF NOT EXISTS promise ({columns})")
            self._add_column("before", "0")
            self._add_column("adapters", "[]")
            self._add_column("adapters_before", "[]")
            self._add_column("fleet", str(_new().fleet))
            self._db.execute("CREATE TABLE IF NOT EXISTS held (id INTEGER PRIMARY KEY, held)")
            self.held = self._read_held(path)
            row = self._row()
            found = _new() if row is None else _read(row, path)
            self.earlier = min(found.lease, MAX_LEASE)
            self.promise = replace(found, fence=found.fence + 1, lease=max(self.earlier, lease))
            self._put(self.promise)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise UpdateInProgress(
                    f"another coordinator has the record {path}: a fleet has one at a time; give "
                    "another fleet a --record DIR of its own"
                ) from error
            raise ConfigError(f"the fleet's record {path} cannot be kept: {error}") from error

    def write(self, promise: Promise) -> None:
        """Returns once it would survive the loss of power; raises ``ConfigError`` where not."""
        with self._lock:
            self._write(lambda: self._put(promise), lambda: self._row() == tuple(_values(promise)))
            self.promise = promise

    def hold(self, wanted: Callable[[], Held]) -> None:
        """As ``write``, of what members are held in when its turn has come; from any thread."""
        with self._lock:
            if (held := wanted()) == self.held:
                return
            text = json.dumps({"paused": held.paused, "asleep": sorted(held.asleep)})
            self._write(lambda: self._put_held(text), lambda: self._held_text() == text)
            self.held = held

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _undo(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _write(self, put: Callable[[], None], is_there: Callable[[], bool]) -> None:
        try:
            self._undo()  # what an earlier write that failed may have left
            self._db.execute("BEGIN IMMEDIATE")
            put()
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._undo()
            # A write may fail after it is what the disk holds; one that is open reads as if it was.
            if self._db.in_transaction or not _is_true(is_there):
                raise ConfigError(f"the fleet's record could not be written: {error}") from error

    def _put_held(self, text: str) -> None:
        self._db.execute("REPLACE INTO held (id, held) VALUES (0, ?)", (text,))
        self._db.execute("COMMIT")

    def _held_text(self) -> str | None:
        found = self._db.execute("SELECT held FROM held WHERE id = 0").fetchone()
        return None if found is None else str(found[0])

    def _read_held(self, path: Path) -> Held | None:
        if (text := self._held_text()) is None:
            return None
        try:
            found = json.loads(text)
            return Held(bool(found["paused"]), frozenset(map(str, found["asleep"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the fleet's record {path} is damaged: {error}") from error

    def _row(self) -> tuple[str, ...] | None:
        select = f"SELECT {_COLUMNS} FROM promise WHERE id = 0"
        found: tuple[str, ...] | None = self._db.execute(select).fetchone()
        return found

    def _add_column(self, name: str, default: str) -> None:
        """To a record that was begun without it."""
        if all(row[1] != name for row in self._db.execute("PRAGMA table_info(promise)")):
            self._db.execute(f"ALTER TABLE promise ADD COLUMN {name} DEFAULT '{default}'")

    def _put(self, promise: Promise) -> None:
        values = _values(promise)
        holes = ", ".join("?" * len(values))
        self._db.execute(f"REPLACE INTO promise (id, {_COLUMNS}) VALUES (0, {holes})", values)
        self._db.execute("COMMIT")


def _is_true(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except sqlite3.Error:
        return False


def _values(promise: Promise) -> list[str]:
    """Text: an epoch or a digest has 64 bits, of which SQLite's integers have 63.

    Adapters are JSON, [[name, version, digest], ...].
    """
    return [v if isinstance(v, str) else json.dumps(v) for v in astuple(promise)]


def _new() -> Promise:
    epoch, fleet = secrets.randbits(48), secrets.randbits(48)
    return Promise(fence=0, epoch=epoch, version=0, digest=0, fleet=fleet)


def _read(row: tuple[str, ...], path: Path) -> Promise:
    plain = dict(zip(asdict(_new()), row, strict=True))
    try:
        whole = ("fence", "epoch", "version", "digest", "before", "fleet")
        numbers = {name: int(plain[name]) for name in whole}
        return Promise(
            **numbers,
            update_id=plain["update_id"],
            lease=float(plain["lease"]),
            adapters=_adapters(plain["adapters"]),
            adapters_before=_adapters(plain["adapters_before"]),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the fleet's record {path} is damaged: {error}") from error


def _adapters(text: str) -> tuple[HeldAdapter, ...]:
    rows = json.loads(text)
    return tuple(HeldAdapter(str(name), int(number), int(digest)) for name, number, digest in rows)

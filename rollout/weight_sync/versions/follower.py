"""Follows a directory into which a trainer writes checkpoints or versions, and updates an engine,
or a fleet.

The number at the end of a name in it is a version (``directories.py``). The newest one that is
complete and newer than what is live is read and sent by the usual way; incomplete ones are looked
at again, and warned of where nobody goes on writing them; what cannot be used is passed over.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import (
    ConfigError,
    IncompleteUpdate,
    RolloutError,
    SourceFailed,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightError,
)
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import LinkOver, WeightLink
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.publisher import publish
from rollout.weight_sync.versions.directories import (
    WrittenVersion,
    allowed,
    complete_source,
    inside,
    looks,
)
from rollout.weight_sync.versions.passed_over import Candidate, PassedOver

POLL = 1.0  # seconds between looks at the directory
AGAIN = 30.0  # seconds until what a file system refused to read is tried again

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]+)")
_DIGITS = 15  # of the highest numbers that versions have
_NOT_ITS_OWN = (UpdateInProgress, TransferFailed, VersionConflict)  # nothing its files could mend
log = logging.getLogger(__name__)


class Follower:
    """Brings an engine to the newest complete version in ``directory``.

    ``roots`` are the only directories that are ever read (``--weight-dir``); a directory outside
    them is a ``ConfigError``, and a file that leads out of them one of that version. ``on_state``
    hears the error of every look that failed, and "" when a version has become live.
    """

    def __init__(
        self,
        directory: str | Path,
        roots: Sequence[str | Path],
        connect: Callable[[], WeightLink],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        on_state: Callable[[str], None] = lambda error: None,
    ) -> None:
        self._roots = [Path(root).resolve() for root in roots]
        self._leads_to = allowed(directory, roots)
        self._directory = Path(directory).absolute()  # a link may lead elsewhere later
        self._reach, self._timeout = connect, timeout
        self._opened: WeightChannel | None = None
        self._reading: Path | None = None  # what this look updates from
        self._failed: dict[Path, _Failed] = {}  # what could not be used
        self._incomplete: dict[Path, object] = {}  # what it looked like when it was not complete
        self._looked: dict[Path, object] = {}  # what directories look like, in this look
        self._looked_before: dict[Path, object] = {}  # and in the one before
        self._warned: set[tuple[Path, str]] = set()  # of what, and why
        self._said = ""  # the last error
        self._passed_over = PassedOver()
        self._on_state = on_state

    def run(self, stop: threading.Event, poll: float = POLL) -> None:
        """Follow until ``stop`` is set; what goes wrong is logged once, and tried again."""
        while not stop.is_set():
            try:
                receipt = self.look()
                if receipt is not None:
                    log.info("version %d is live, from %s", receipt.version, receipt.label)
                    self._note("")
            except Exception as error:
                if not stop.is_set():
                    text = f"{type(error).__name__}: {error}"
                    if self._reading is not None and str(self._reading) not in text:
                        text = f"{self._reading}: {text}"
                    if text != self._said:
                        log.error("%s", text, exc_info=not isinstance(error, RolloutError))
                    self._note(text)
            stop.wait(poll)

    def interrupt(self, reason: str) -> None:
        """From another thread: an update under way ends now, and changes nothing."""
        if self._opened is not None:
            self._opened.abort(reason)

    def look(self) -> UpdateReceipt | None:
        """Update to the newest complete version, if there is a newer one than what is live.

        One that cannot be used is passed over for the next older one, and said once: raised here
        where nothing else was found, logged else. Raises what its update raised; the same files
        are then not tried again, unless the fault was the engine's or the link's.
        """
        self._reading = None
        self._looked_before, self._looked = self._looked, {}
        info = self._connect().info()
        candidates = sorted(self._candidates(), reverse=True)
        ahead = {c.path for c in candidates if c.version > info.version}
        self._failed = {path: known for path, known in self._failed.items() if path in ahead}
        self._incomplete = {path: seen for path, seen in self._incomplete.items() if path in ahead}
        self._passed_over.warn_of_late(candidates, info)
        problems: list[RolloutError] = []
        receipt = None
        try:
            for candidate in candidates:
                if candidate.version <= info.version:
                    self._passed_over.warn_of_taken(candidate, info)
                    break
                try:
                    source = self._usable(candidate, info)
                except RolloutError as error:
                    problems.append(error)
                    continue
                if source is not None:
                    receipt = self._update(candidate, source)
                    break
        finally:
            for problem in problems if receipt is not None else problems[1:]:
                log.warning("%s: %s", type(problem).__name__, problem)
        if receipt is None and problems:
            raise problems[0]
        return receipt

    def _connect(self) -> WeightLink:
        return _Watched(self._reach(), self)

    def _usable(self, candidate: Candidate, info: WeightInfo) -> Any | None:
        """What to update from; None where it is incomplete, or known to be of no use.

        Raises why it is of no use, for as long as its files look the same only once, and again
        each ``AGAIN`` seconds where the file system would not have them read.
        """
        known = self._failed.get(candidate.path)
        if known is not None and time.monotonic() < known.at + AGAIN and self._are_as(known):
            return None
        looked = self._looks(candidate.path)
        try:
            return complete_source(candidate.path, self._roots, info)
        except IncompleteUpdate as error:
            self._warn_if_left(candidate.path, looked, str(error))
            return None
        except RolloutError as error:
            self._failed[candidate.path] = _Failed.by(error, {candidate.path: looked})
            raise
        except Exception as error:  # whatever a file system says of what others write to it
            self._failed[candidate.path] = _Failed.by(error, {candidate.path: looked})
            raise SourceFailed(f"{candidate.path} cannot be read, skipped: {error}") from error

    def _update(self, candidate: Candidate, source: Any) -> UpdateReceipt:
        self._reading = candidate.path
        read = source.folders() if isinstance(source, WrittenVersion) else [candidate.path]
        looked = {path: self._looks(path) for path in read}
        options = UpdateOptions(
            version=candidate.version, label=candidate.path.name, timeout=self._timeout
        )
        try:
            receipt = publish(source, connect=self._connect, options=options)
            self._passed_over.has_followed(candidate)
            return receipt
        except (WeightError, ConfigError) as error:
            damaged = isinstance(source, WrittenVersion) and source.damaged
            if damaged or not isinstance(error, _NOT_ITS_OWN):
                self._failed[candidate.path] = _Failed.by(error, looked)
            raise

    def _are_as(self, known: _Failed) -> bool:
        return all(self._looks(path) == seen for path, seen in known.looked.items())

    def _looks(self, path: Path) -> object:
        """Once in a look, and one object for as long as it is the same: many versions may be built
        on one.
        """
        if path not in self._looked:
            found, before = looks(path), self._looked_before.get(path)
            self._looked[path] = before if before == found else found
        return self._looked[path]

    def _warn_if_left(self, path: Path, looked: object, why: str) -> None:
        """Once for each reason of what is not complete, and did not grow since the last look."""
        before, self._incomplete[path] = self._incomplete.get(path), looked
        if before == looked:
            self._warn_once(
                path, why, "%s is incomplete, and is not read until its files change: %s"
            )

    def _warn_once(self, path: Path, why: str, text: str) -> None:
        if (path, why) not in self._warned:
            self._warned.add((path, why))
            log.warning(text, path, why)

    def _candidates(self) -> Iterator[Candidate]:
        found = inside(self._directory, self._roots)
        if found != self._leads_to:
            self._leads_to = found
            self._passed_over.start_anew()
        try:
            paths = list(found.iterdir())
        except OSError as error:
            raise SourceFailed(f"{self._directory} cannot be read: {error}") from error
        for path in paths:
            match = _NUMBER.fullmatch(path.name)
            if not match or path.name.startswith((".", "tmp")) or not os.path.isdir(path):
                continue
            if int(match[1]) < 10**_DIGITS:
                yield Candidate(int(match[1]), path)
            else:
                why = f"its number has more than {_DIGITS} digits"
                self._warn_once(path, why, "%s is not followed: %s; give it a lower one")

    def _note(self, error: str) -> None:
        self._said = error
        self._on_state(error)


@dataclass(frozen=True, slots=True)
class _Failed:
    """What directories looked like when what is read from them could not be used."""

    looked: dict[Path, object]
    at: float  # when the file system failed, by ``time.monotonic``; else infinite

    @classmethod
    def by(cls, error: BaseException, looked: dict[Path, object]) -> _Failed:
        """A disk, or a server of files, that failed may have recovered: files do not show it."""
        causes: list[BaseException] = []
        cause: BaseException | None = error
        while cause is not None and cause not in causes:  # an error may be its own cause's cause
            causes.append(cause)
            cause = cause.__cause__
        passing = any(isinstance(one, OSError) for one in causes)
        return cls(looked, time.monotonic() if passing else float("inf"))


class _Watched(LinkOver):
    """``link``, of which the follower knows the channel that was opened last."""

    def __init__(self, link: WeightLink, follower: Follower) -> None:
        super().__init__(link)
        self._follower = follower

    def open(self) -> WeightChannel:
        self._follower._opened = channel = super().open()
        return channel

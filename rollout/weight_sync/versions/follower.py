"""Follows a directory into which a trainer writes checkpoints or versions, and updates an engine,
or a fleet.

    DIR/checkpoint-500/     any name that ends in a number: what a cold start reads, with an index
                            if sharded
    DIR/000000000500/       a version with its manifest (``reader.py``)

The number is the version. The newest one that is complete and newer than what is live is read and
sent by the usual way; incomplete ones are looked at again, and warned of where nobody goes on
writing them; what cannot be used is passed over.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor

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
from rollout.loader.sharded_state import ShardedFiles, is_sharded
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import LinkOver, WeightLink
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.publisher import publish
from rollout.weight_sync.versions.reader import MANIFEST, VersionSource, folder
from rollout.weight_sync.versions.store import LocalStore
from rollout.weights.files import (
    KINDS,
    SAFETENSORS,
    FileKind,
    Shards,
    TorchFiles,
    Written,
    find_shards,
    weight_files,
    why_none,
)
from rollout.weights.files.safetensors_files import SafetensorsFiles

POLL = 1.0  # seconds between looks at the directory

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]+)")
_DIGITS = 15  # of the highest numbers that versions have
_NOT_ITS_OWN = (UpdateInProgress, TransferFailed, VersionConflict)  # nothing its files could mend
_IN_TURN = 32  # directories whose files are looked at again each time
_SHARD = re.compile(r".*-[0-9]+-of-[0-9]+\.[a-z]+")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A directory that is, or will be, a version."""

    version: int
    path: Path


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
        self._failed: dict[Path, object] = {}  # what it looked like when it could not be used
        self._incomplete: dict[Path, object] = {}  # what it looked like when it was not complete
        self._warned: set[tuple[Path, str]] = set()  # of what, and why
        self._said = ""  # the last error
        self._followed = 0  # the newest version that came from here
        self._skipped: Path | None = None  # the last one that was warned of
        self._seen: dict[Path, Written] | None = None  # weights' files, by directory
        self._turn = 0  # whose are looked at next
        self._late: set[Path] = set()  # those that were warned of as written too late
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
        info = self._connect().info()
        candidates = sorted(self._candidates(), reverse=True)
        self._failed = {c.path: self._failed[c.path] for c in candidates if c.path in self._failed}
        self._warn_of_late(candidates, info)
        problems: list[RolloutError] = []
        receipt = None
        try:
            for candidate in candidates:
                if candidate.version <= info.version:
                    self._warn_of(candidate, info)
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

        Raises why it is of no use, for as long as its files look the same only once.
        """
        looked = looks(candidate.path)
        if self._failed.get(candidate.path) == looked:
            return None
        try:
            return complete_source(candidate.path, self._roots, info)
        except IncompleteUpdate as error:
            self._warn_if_left(candidate.path, looked, str(error))
            return None
        except RolloutError:
            self._failed[candidate.path] = looked
            raise
        except Exception as error:  # whatever a file system says of what others write to it
            self._failed[candidate.path] = looked
            raise SourceFailed(f"{candidate.path} cannot be read, skipped: {error}") from error

    def _update(self, candidate: Candidate, source: Any) -> UpdateReceipt:
        looked, self._reading = looks(candidate.path), candidate.path
        options = UpdateOptions(
            version=candidate.version, label=candidate.path.name, timeout=self._timeout
        )
        try:
            receipt = publish(source, connect=self._connect, options=options)
            self._followed = receipt.version
            if self._seen is not None:
                self._seen[candidate.path] = _written(candidate.path)
            return receipt
        except (WeightError, ConfigError) as error:
            damaged = isinstance(source, _Version) and source.damaged
            if damaged or not isinstance(error, _NOT_ITS_OWN):
                self._failed[candidate.path] = looked
            raise

    def _warn_of(self, candidate: Candidate, info: WeightInfo) -> None:
        """Once of the newest one whose number another commit has taken."""
        if (candidate.version, candidate.path.name) == (info.version, info.label):
            self._followed = info.version  # a front's before this one took it
        if candidate.version <= self._followed or candidate.path == self._skipped:
            return
        self._skipped = candidate.path
        log.warning(
            "%s is not read: version %d is live already, by another commit (of weights or of an "
            "adapter), and only what is numbered above it is followed: write it as %d or later",
            candidate.path, info.version, info.version + 1,
        )  # fmt: skip

    def _warn_of_late(self, candidates: Sequence[Candidate], info: WeightInfo) -> None:
        """Once of each whose weights were written when a number as high as its own had been
        followed, as by a trainer that began anew.
        """
        before, self._seen = self._seen, {}
        self._late &= {candidate.path for candidate in candidates}
        self._turn += _IN_TURN
        for index, candidate in enumerate(candidates):
            path, known = candidate.path, (before or {}).get(candidate.path)
            is_due = (self._turn - index) % len(candidates) < _IN_TURN
            is_due = is_due or candidate.version > info.version  # what this look may pass over
            seen = known if known is not None and not is_due else _written(path, known)
            self._seen[path] = seen
            passed = candidate.version <= min(info.version, self._followed)
            is_known = before is None or _read(seen) <= (known or set())
            if is_known or not passed or path in self._late:
                continue
            self._late.add(path)
            log.warning(
                "%s is not read: it was written after version %d had come from here, and only what "
                "is numbered above the live version, %d, is followed. A trainer that begins anew "
                "numbers on from there, or writes into another directory, for a service that is "
                "started with that one; update_weights(server_path=...) takes this one by hand",
                path, self._followed, info.version,
            )  # fmt: skip

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
        if found != self._leads_to:  # nothing has come from there yet, and all there is no news
            self._leads_to, self._followed, self._seen = found, 0, None
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


def _written(path: Path, known: Written | None = None) -> Written:
    """The files of a directory that may hold weights; ``known`` where it cannot be looked at."""
    try:
        return weight_files(path, MANIFEST)
    except OSError:
        return known or frozenset()


def _read(written: Written) -> Written:
    """Those that are read, by their kind: others are what a trainer goes on from."""
    for pattern in (pattern for kind in KINDS for pattern in kind.patterns):
        if found := frozenset(one for one in written if fnmatch(one[0], pattern)):
            return found
    return written


class _Watched(LinkOver):
    """``link``, of which the follower knows the channel that was opened last."""

    def __init__(self, link: WeightLink, of: Follower) -> None:
        super().__init__(link)
        self._of = of

    def open(self) -> WeightChannel:
        self._of._opened = channel = super().open()
        return channel


class _Version(VersionSource):
    """A written version, which remembers that its own files were at fault."""

    damaged = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from super().__iter__()
        except RolloutError:
            self.damaged = True
            raise


def warn_of_absent(roots: Sequence[str | Path]) -> None:
    """A line in the log for each root that is not there: a trainer may make it later, or never."""
    for root in roots:
        if not Path(root).is_dir():
            log.warning("--weight-dir %s (weight_dirs=): no such directory yet", root)


def allowed(
    directory: str | Path, roots: Sequence[str | Path], remedy: str = "create it first"
) -> Path:
    """``directory``, resolved; ``ConfigError`` unless it exists and lies in one of ``roots``."""
    found = inside(directory, roots)
    if not found.is_dir():
        raise ConfigError(f"{directory} is not a directory; {remedy}")
    return found


def inside(directory: str | Path, roots: Sequence[str | Path]) -> Path:
    """``directory``, resolved; ``ConfigError`` unless it would lie in one of ``roots``."""
    if "\0" in str(directory):
        raise ConfigError(f"no path has a null byte in it: {str(directory)!r:.80}")
    found = Path(directory).resolve()
    if not any(found.is_relative_to(Path(root).resolve()) for root in roots):
        raise ConfigError(
            f"{directory} is outside every --weight-dir; allow it with --weight-dir {directory} "
            "(weight_dirs= in Python)"
        )
    return found


def readable(directory: str | Path, roots: Sequence[str | Path], info: WeightInfo) -> Any:
    """What ``publish`` takes of a checkpoint or version in ``directory``, which may be read.

    Raises ``ConfigError`` where it, or a file in it, lies outside ``roots``, and
    ``IncompleteUpdate`` where it is half-written.
    """
    found = allowed(directory, roots)
    try:
        return complete_source(found, [Path(root).resolve() for root in roots], info)
    except OSError as error:
        raise SourceFailed(f"{found} cannot be read: {error}") from error


def complete_source(path: Path, roots: Sequence[Path], info: WeightInfo) -> Any:
    """What to update from; ``IncompleteUpdate`` where it is still being written.

    A version's files, and those of the versions that it patches, are read inside ``roots`` alone.
    """
    check_inside(path, roots)
    written = path.name.isdecimal() and path.name == folder(int(path.name))
    if written and not weight_files(path):  # else a checkpoint with a name of twelve digits
        store = LocalStore(path.parent, within=roots)
        return _Version(store, int(path.name), dtype=info.dtype)
    check_checkpoint(path)
    return path


def check_inside(directory: Path, roots: Sequence[str | Path]) -> None:
    """Raise ``ConfigError`` where ``directory``, or a file in it, leads out of ``roots``."""
    within = [Path(root).resolve() for root in roots]
    for file in (directory, *directory.iterdir()):
        found = file.resolve()
        if not any(found.is_relative_to(root) for root in within):
            raise ConfigError(f"{file} leads to {found}, outside every --weight-dir; not read")


def check_checkpoint(path: Path) -> None:
    """Raise ``IncompleteUpdate`` unless every file that a cold start would read is there, whole."""
    if is_sharded(path):
        try:
            ShardedFiles(path, mapped=False).close()
        except ConfigError as error:
            raise IncompleteUpdate(str(error)) from error
        return
    for kind in KINDS:
        try:
            shards = find_shards(path, kind)
        except ConfigError as error:  # an index that is half-written, or ahead of its shards
            raise IncompleteUpdate(str(error)) from error
        if shards.files:
            break
    else:
        raise IncompleteUpdate(
            f"{path} has no *.safetensors and no {MANIFEST}, .bin or .pt file{why_none(path)}"
        )
    if shards.index is None and any(_SHARD.fullmatch(file.name) for file in shards.files):
        raise IncompleteUpdate(f"{path} has shards but no {kind.indexes[0]} yet")
    for file in shards.files:
        _check_whole(file, kind)


def _check_whole(file: Path, kind: FileKind) -> None:
    """Opened, which compares its header with its length; an archive of torch's is not read: its
    table of contents stands at its end.
    """
    with file.open("rb") as opened:
        is_archive = kind is not SAFETENSORS and opened.read(2) == b"PK"
    if is_archive:
        if not zipfile.is_zipfile(file):
            raise IncompleteUpdate(f"{file} is half-written")
        return
    try:
        form = SafetensorsFiles if kind is SAFETENSORS else TorchFiles
        form(Shards((file,)), mapped=False).close()
    except ConfigError as error:
        raise IncompleteUpdate(f"{file} is half-written, or of no use: {error}") from error


def looks(path: Path) -> object:
    """Changes whenever a file in ``path`` does, or who may read it, or what is in the way of it."""
    found = []
    try:
        for file in sorted(path.iterdir()):
            stat = file.stat() if file.exists() else file.lstat()
            who = stat.st_mode, stat.st_uid, stat.st_gid
            found.append((file.name, stat.st_size, stat.st_mtime_ns, who))
    except OSError as error:
        return str(error)
    return found

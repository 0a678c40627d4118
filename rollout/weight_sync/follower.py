"""Follows a directory into which a trainer writes checkpoints or versions, and updates an engine.

    DIR/checkpoint-500/     any name that ends in a number: safetensors, with an index if sharded
    DIR/000000000500/       a version with its manifest (``transports.disk``)

The number is the version. The newest one that is complete and newer than what is live is read and
sent by the usual way; incomplete ones are looked at again.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
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
    WeightError,
)
from rollout.updates import WeightInfo
from rollout.weight_sync.link import WeightLink
from rollout.weight_sync.options import UpdateOptions
from rollout.weight_sync.publisher import publish
from rollout.weight_sync.transports.disk import MANIFEST, VersionSource, folder
from rollout.weight_sync.transports.store import LocalStore
from rollout.weights import UpdateReceipt

POLL = 1.0  # seconds between looks at the directory
INDEX = "model.safetensors.index.json"
MAX_HEADER = 256 << 20

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,12})")
_SHARD = re.compile(r".*-[0-9]+-of-[0-9]+\.safetensors")
_LENGTH = struct.Struct("<Q")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A directory that is, or will be, a version."""

    version: int
    path: Path


class Follower:
    """Brings an engine to the newest complete version in ``directory``.

    ``roots`` are the only directories that are ever read (``--weight-dir``); a directory outside
    them is a ``ConfigError``, and a file that leads out of them one of that version.
    """

    def __init__(
        self,
        directory: str | Path,
        roots: Sequence[str | Path],
        connect: Callable[[], WeightLink],
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._roots = [Path(root).resolve() for root in roots]
        self._directory = allowed(directory, roots)
        self._connect, self._timeout = connect, timeout
        self._failed: dict[Path, object] = {}  # what it looked like when it could not be used

    def run(self, stop: threading.Event, poll: float = POLL) -> None:
        """Follow until ``stop`` is set; what goes wrong is logged and tried again."""
        while not stop.is_set():
            try:
                receipt = self.look()
                if receipt is not None:
                    log.info("version %d is live, from %s", receipt.version, receipt.label)
            except RolloutError as error:
                if not stop.is_set():
                    log.error("%s: %s", type(error).__name__, error)
            stop.wait(poll)

    def look(self) -> UpdateReceipt | None:
        """Update to the newest complete version, if there is a newer one than what is live.

        Raises what its update raised; the same files are then not tried again, unless the fault
        was the engine's or the link's.
        """
        info = self._connect().info()
        for candidate in sorted(self._candidates(), reverse=True):
            if candidate.version <= info.version:
                return None
            looks = _looks(candidate.path)
            if self._failed.get(candidate.path) == looks:
                continue
            try:
                source = complete_source(candidate.path, self._roots, info)
            except IncompleteUpdate as error:
                log.debug("not complete yet: %s", error)
                continue
            options = UpdateOptions(
                version=candidate.version, label=candidate.path.name, timeout=self._timeout
            )
            try:
                return publish(source, connect=self._connect, options=options)
            except WeightError as error:
                if not isinstance(error, UpdateInProgress | TransferFailed):
                    self._failed[candidate.path] = looks
                raise
        return None

    def _candidates(self) -> Iterator[Candidate]:
        try:
            paths = list(self._directory.iterdir())
        except OSError as error:
            raise SourceFailed(f"{self._directory} cannot be read: {error}") from error
        for path in paths:
            match = _NUMBER.fullmatch(path.name)
            if match and not path.name.startswith((".", "tmp")) and path.is_dir():
                _check_inside(path, self._roots)
                yield Candidate(int(match[1]), path)


def allowed(directory: str | Path, roots: Sequence[str | Path]) -> Path:
    """``directory``, resolved; ``ConfigError`` unless it exists and lies in one of ``roots``."""
    found = Path(directory).resolve()
    if not any(found.is_relative_to(Path(root).resolve()) for root in roots):
        raise ConfigError(
            f"{directory} is outside every --weight-dir; allow it with --weight-dir {directory}"
        )
    if not found.is_dir():
        raise ConfigError(f"{directory} is not a directory; create it first")
    return found


def readable(directory: str | Path, roots: Sequence[str | Path], info: WeightInfo) -> Any:
    """What ``publish`` takes of a checkpoint or version in ``directory``, which may be read.

    Raises ``ConfigError`` where it, or a file in it, lies outside ``roots``, and
    ``IncompleteUpdate`` where it is half-written.
    """
    return complete_source(allowed(directory, roots), [Path(r).resolve() for r in roots], info)


def complete_source(path: Path, roots: Sequence[Path], info: WeightInfo) -> Any:
    """What to update from; ``IncompleteUpdate`` where it is still being written."""
    for file in path.iterdir():
        _check_inside(file, roots)
    if path.name.isdecimal() and path.name == folder(int(path.name)):
        return VersionSource(LocalStore(path.parent), int(path.name), dtype=info.dtype)
    check_checkpoint(path)
    return path


def _check_inside(file: Path, roots: Sequence[Path]) -> None:
    found = file.resolve()
    if not any(found.is_relative_to(root) for root in roots):
        raise ConfigError(f"{file} leads to {found}, outside every --weight-dir; not read")


def check_checkpoint(path: Path) -> None:
    """Raise ``IncompleteUpdate`` unless every safetensors file of a checkpoint is there, whole."""
    names = {file.name for file in path.glob("*.safetensors")}
    if (path / INDEX).exists():
        try:
            wanted = set(json.loads((path / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise IncompleteUpdate(f"{path / INDEX} is half-written: {error}") from error
    elif any(_SHARD.fullmatch(name) for name in names):
        raise IncompleteUpdate(f"{path} has shards but no {INDEX} yet")
    else:
        wanted = names
    if not wanted:
        raise IncompleteUpdate(f"{path} has no *.safetensors and no {MANIFEST}")
    for name in sorted(map(str, wanted)):
        if name not in names:
            raise IncompleteUpdate(f"{path / name} is missing")
        _check_whole(path / name)


def _check_whole(file: Path) -> None:
    """A safetensors file says in its header where its data end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = _LENGTH.unpack(opened.read(_LENGTH.size))[0]
            if length > min(size, MAX_HEADER):
                raise IncompleteUpdate(f"{file} is half-written")
            header = json.loads(opened.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteUpdate(f"{file} is half-written: {error}") from error
    if size != _LENGTH.size + length + max(ends, default=0):
        raise IncompleteUpdate(f"{file} is half-written: {size} bytes")


def _looks(path: Path) -> object:
    """Changes whenever a file in ``path`` does."""
    found = []
    for file in sorted(path.iterdir()):
        if file.is_file():
            stat = file.stat()
            found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return found

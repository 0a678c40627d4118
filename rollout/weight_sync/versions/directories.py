"""What a directory of weights holds, whether it is whole, and whether it may be read.

DIR/checkpoint-500/     any name that ends in a number: what a cold start reads, with an index
                        if sharded
DIR/000000000500/       a version with its manifest (``reader.py``)
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from rollout.errors import ConfigError, IncompleteUpdate, RolloutError, SourceFailed
from rollout.loader.sharded_state import ShardedFiles, is_sharded, rank_files
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.versions.reader import (
    MANIFEST,
    MAX_CHAIN,
    VersionSource,
    folder,
    read_manifest,
)
from rollout.weight_sync.versions.store import LocalStore
from rollout.weights.files import (
    KINDS,
    SAFETENSORS,
    FileKind,
    Shards,
    TorchFiles,
    find_shards,
    weight_files,
    why_none,
    why_unwritten,
)
from rollout.weights.files.safetensors_files import SafetensorsFiles

_SHARD = re.compile(r".*-[0-9]+-of-[0-9]+\.[a-z]+")
log = logging.getLogger(__name__)


class WrittenVersion(VersionSource):
    """A written version, which remembers that its own files were at fault."""

    damaged = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from super().__iter__()
        except RolloutError:
            self.damaged = True
            raise

    def folders(self) -> Iterator[Path]:
        """Its own, and those of the versions that it patches, as far down as they can be read."""
        store, version = cast(LocalStore, self._store), self.manifest.version
        for _ in range(MAX_CHAIN):
            yield store.root / folder(version)
            try:
                base = read_manifest(store, version).base
            except (RolloutError, OSError):
                return
            if base is None:
                return
            version = base


def warn_of_absent(roots: Sequence[str | Path]) -> None:
    """A line in the log for each root that is not there: a trainer may make it later, or never."""
    for root in roots:
        if not Path(root).is_dir():
            log.warning("--weight-dir %s (weight_dirs=): no such directory yet", root)


def allowed(
    directory: str | Path, roots: Sequence[str | Path], remedy: str = "create it first"
) -> Path:
    """``directory``, resolved; ``ConfigError`` unless it exists and lies in one of ``roots``.

    ``SourceFailed`` where the file system does not let us see whether it does.
    """
    found = inside(directory, roots)
    try:
        is_directory = found.is_dir()
    except OSError as error:
        raise SourceFailed(f"{directory} cannot be read: {error}") from error
    if not is_directory:
        raise ConfigError(f"{directory} is not a directory; {remedy}")
    return found


def inside(directory: str | Path, roots: Sequence[str | Path]) -> Path:
    """``directory``, resolved; ``ConfigError`` unless it would lie in one of ``roots``."""
    if "\0" in str(directory):
        raise ConfigError(f"no path has a null byte in it: {str(directory)!r:.80}")
    found = _behind_links(Path(directory))
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
        return WrittenVersion(store, int(path.name), dtype=info.dtype)
    check_checkpoint(path)
    return path


def check_inside(directory: Path, roots: Sequence[str | Path]) -> None:
    """Raise ``ConfigError`` where ``directory``, or a file in it, leads out of ``roots``."""
    within = [Path(root).resolve() for root in roots]
    for file in (directory, *directory.iterdir()):
        found = _behind_links(file)
        if not any(found.is_relative_to(root) for root in within):
            raise ConfigError(f"{file} leads to {found}, outside every --weight-dir; not read")


def _behind_links(path: Path) -> Path:
    """Where it leads; raises ``SourceFailed`` where that is in a circle."""
    with suppress(RuntimeError):  # before Python 3.13, which gives a link of the circle
        found = path.resolve()
        if not os.path.islink(found):  # nor raises where it may not be looked at
            return found
    raise SourceFailed(f"{path} cannot be read: its links lead in a circle")


def check_checkpoint(path: Path) -> None:
    """Raise ``IncompleteUpdate`` unless every file that a cold start would read is there, whole."""
    if is_sharded(path):
        try:
            for file in rank_files(path):
                _check_end(file)
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
    _check_end(file)
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


def _check_end(file: Path) -> None:
    if why := why_unwritten(file):
        raise IncompleteUpdate(why)


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

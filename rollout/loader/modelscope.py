"""Checkpoints of ModelScope (``modelscope://owner/name``), fetched once into a local directory.

By the two routes of its API that a download needs: the list of a revision's files, and one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rollout.errors import ConfigError
from rollout.loader.remote import SIDE_FILES
from rollout.weights.files import FileKind

SCHEME = "modelscope://"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WAIT = 60.0  # seconds without a byte
_CHUNK = 4 << 20


def fetch_modelscope(model: str, revision: str | None, kinds: Iterable[FileKind | None]) -> Path:
    """The directory of ``model`` with its weights of the first of ``kinds`` that it has (None: none
    are needed): from the cache in ``$HF_HOME/rollout``, else downloaded.

    ``MODELSCOPE_DOMAIN`` is another host than www.modelscope.cn, ``MODELSCOPE_API_TOKEN`` a token.
    Raises ``ConfigError`` naming the id, the revision and the remedy.
    """
    from huggingface_hub.constants import HF_HOME

    name, revision = model.removeprefix(SCHEME), revision or "master"
    if not _ID.fullmatch(name):
        raise ConfigError(f"{model!r} is no ModelScope id; write {SCHEME}owner/name")
    of = hashlib.sha256(f"{name}@{revision}".encode()).hexdigest()[:24]
    target = Path(HF_HOME) / "rollout" / f"modelscope-{of}"
    wanted = list(kinds)
    for kind in wanted:
        if _mark(target, kind).exists():
            return target
    with _said(model, revision):
        repository = _Repository(name, revision)
        held = repository.files()
        names = {file.name for file in held}
        for kind in wanted:
            patterns = kind.patterns if kind is not None else ()
            if patterns and not any(fnmatch(n, p) for n in names for p in patterns):
                continue
            target.mkdir(parents=True, exist_ok=True)
            for file in held:
                if any(fnmatch(file.name, pattern) for pattern in (*SIDE_FILES, *patterns)):
                    repository.fetch(file, target)
            if not (target / "config.json").is_file():
                raise ConfigError(f"{model} holds no config.json; is it a checkpoint?")
            _mark(target, kind).touch()
            return target
    raise ConfigError(f"{model}: ModelScope has no weights of that load_format at {revision}")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    sha256: str  # "" where the listing has none

    def is_at(self, path: Path) -> bool:
        """Whether it lies there, whole, and not of another upload."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as held:
            return not self.sha256 or hashlib.file_digest(held, "sha256").hexdigest() == self.sha256


class _Repository:
    """One revision of a model on ModelScope."""

    def __init__(self, name: str, revision: str) -> None:
        domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
        base = domain if "://" in domain else f"https://{domain}"
        self._root, self._revision = f"{base.rstrip('/')}/api/v1/models/{name}/repo", revision

    def files(self) -> list[_File]:
        """Of its top folder, but for ``consolidated*``."""
        query = urlencode({"Revision": self._revision, "Recursive": "true"})
        with self._open(f"{self._root}/files?{query}") as reply:
            said: Any = json.load(reply)
        rows = [row for row in said["Data"]["Files"] if row.get("Type") != "tree"]
        return [
            _File(row["Path"], int(row["Size"]), str(row.get("Sha256") or ""))
            for row in rows
            if "/" not in row["Path"] and not row["Path"].startswith(("consolidated", "."))
        ]

    def fetch(self, file: _File, into: Path) -> None:
        """Write it, once it is whole and what its checksum says."""
        target = into / file.name
        if file.is_at(target):
            return
        half = into / f"{file.name}.{os.getpid()}.part"  # several ranks may do so at once
        query = urlencode({"Revision": self._revision, "FilePath": file.name})
        digest = hashlib.sha256()
        try:
            with self._open(f"{self._root}?{query}") as reply, half.open("wb") as out:
                while chunk := reply.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            if half.stat().st_size != file.size or (
                file.sha256 and digest.hexdigest() != file.sha256
            ):
                raise ConfigError(f"{file.name} came damaged from ModelScope; try again")
            os.replace(half, target)
        finally:
            half.unlink(missing_ok=True)

    def _open(self, url: str) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "rollout"})
        if token := os.environ.get("MODELSCOPE_API_TOKEN"):
            # Not to the storage that a file's route leads on to.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
            request.add_unredirected_header("Cookie", f"m_session_id={token}")
        return urllib.request.urlopen(request, timeout=_WAIT)


def _mark(target: Path, kind: FileKind | None) -> Path:
    """There once all that this kind of weights needs is."""
    return target / f".{'side' if kind is None else kind.name}-complete"


@contextmanager
def _said(model: str, revision: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} (revision {revision}) cannot be downloaded ({error}); check the id and "
            "revision, and for a private model set MODELSCOPE_API_TOKEN"
        ) from error

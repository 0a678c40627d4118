"""Where versions lie: anything that can put, get and list."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollout.errors import ConfigError, SourceFailed

_KEY = re.compile(r"[0-9a-z][0-9a-z./-]*")


class Store(Protocol):
    """Named runs of bytes; a ``put`` that has returned is seen whole by every later ``get``."""

    def put(self, key: str, *parts: bytes | memoryview) -> None:
        """``parts``, one after the other."""
        ...

    def get(self, key: str) -> bytes:
        """Raises ``KeyError`` where there is none."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with ``prefix``."""
        ...


class LocalStore:
    """A directory as a store; nothing outside it is read or written, links included.

    ``within``: where given, nothing outside of all of these directories is, either.
    """

    def __init__(self, root: str | Path, within: Sequence[Path] | None = None) -> None:
        self.root = Path(root).resolve()
        self._within = None if within is None else [Path(one).resolve() for one in within]

    def put(self, key: str, *parts: bytes | memoryview) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with half.open("wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        return bytes(self.get_over(key, bytearray()))

    def get_over(self, key: str, held: bytearray) -> memoryview:
        """The same in the memory of ``held``, or of a longer one: pages are not asked for again."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                size, filled = os.fstat(file.fileno()).st_size, 0
                data = memoryview(held if len(held) >= size else bytearray(size))[:size]
                while count := file.readinto(data[filled:]):
                    filled += count
                return data[:filled]  # less, where it was cut meanwhile
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None
        except OSError as error:
            raise SourceFailed(f"{path} cannot be read: {error}") from error

    def list(self, prefix: str) -> list[str]:
        found = []
        for path in self.root.rglob("*"):
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and not path.name.startswith(".") and path.is_file():
                found.append(key)
        return sorted(found)

    def _path(self, key: str) -> Path:
        path = (self.root / key).resolve()
        if not _KEY.fullmatch(key) or not path.is_relative_to(self.root):
            raise ConfigError(f"{key!r:.200} lies outside the store {self.root}")
        if self._within is not None and not any(map(path.is_relative_to, self._within)):
            raise ConfigError(f"{path} lies outside every --weight-dir; not read")
        return path

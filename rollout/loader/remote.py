"""Checkpoints at a URL (``s3://``, ``gs://``, ``memory://`` ...), read by ranges through fsspec.

``config.json``, the tokenizer and the like are copied once into a directory beside the hub's cache;
of the weights only what a rank takes is read, in parallel ranges, and nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files import Files, unpacked
from rollout.weights.files.box_reader import BoxReader
from rollout.weights.files.safetensors_files import Row, header_length, rows_of

SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "tokenizer*", "*.py")
WHOLE = "model.safetensors"  # all weights in one file
TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer that has several
RANGE = 8 << 20  # bytes of one request
AT_ONCE = 8  # requests of one tensor


def is_remote(model: str) -> bool:
    """Whether ``model`` is the URL of a checkpoint that is read where it is."""
    return "://" in model and not model.startswith("modelscope://")


def fetch_side_files(url: str) -> Path:
    """A local directory with all but the weights of the checkpoint at ``url``."""
    from huggingface_hub.constants import HF_HOME

    fs, root = _filesystem(url)
    target = Path(HF_HOME) / "rollout" / hashlib.sha256(url.encode()).hexdigest()[:24]
    target.mkdir(parents=True, exist_ok=True)
    names = {path.rsplit("/", 1)[-1]: path for path in _listed(fs, root, url)}
    if "config.json" not in names:
        raise ConfigError(f"{url} holds no config.json; is it a checkpoint?")
    if TEMPLATES in names:
        (target / TEMPLATES).mkdir(exist_ok=True)
        held = _listed(fs, names.pop(TEMPLATES), url)
        names |= {f"{TEMPLATES}/{path.rsplit('/', 1)[-1]}": path for path in held}
    for name, path in names.items():
        if any(fnmatch(name, pattern) for pattern in SIDE_FILES):
            half = target / f"{name}.{os.getpid()}.part"  # several ranks may do so at once
            half.write_bytes(_fetched(fs, path, 0, None))
            os.replace(half, target / name)
    return target


def open_remote(url: str) -> Files:
    """The safetensors at ``url``: those that its index names, else all."""
    return unpacked(RemoteFiles(url), fetch_side_files(url))


class RemoteFiles:
    """Headers are read on construction, boxes when they are asked for."""

    def __init__(self, url: str) -> None:
        self._fs, root = _filesystem(url)
        self._rows: dict[str, tuple[RemoteReader, Row]] = {}
        held = {path.rsplit("/", 1)[-1]: path for path in _listed(self._fs, root, url)}
        where = self._index(root, url)
        if where and WHOLE in held and WHOLE not in where.values():  # as in a directory
            held, where = {WHOLE: held[WHOLE]}, {}
        shards = [
            path
            for name, path in held.items()
            if name.endswith(".safetensors") and (not where or name in where.values())
        ]
        if not shards:
            raise ConfigError(f"{url} holds no *.safetensors weights; check the URL")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(self._header, shards))
        for path, rows in zip(shards, found, strict=True):
            reader, name = RemoteReader(self._fs, path), path.rsplit("/", 1)[-1]
            for row in rows:
                if where.get(row.meta.name, name) == name:
                    self._rows[row.meta.name] = reader, row
        if absent := sorted(set(where) - set(self._rows)):
            raise ConfigError(f"{url}: {absent[0]!r} of the index is in none of the files")

    def metadata(self) -> Mapping[str, TensorMeta]:
        return {name: row.meta for name, (_, row) in self._rows.items()}

    def read(self, name: str, box: Box) -> Tensor:
        reader, row = self._rows[name]
        return reader.read(name, row.at, row.meta.dtype, row.meta.shape, box)

    def close(self) -> None:
        for reader, _ in self._rows.values():
            reader.close()

    def _index(self, root: str, url: str) -> dict[str, str]:
        path = f"{root}/{WHOLE}.index.json"
        if not self._fs.exists(path):
            return {}
        try:
            found: dict[str, str] = json.loads(_fetched(self._fs, path, 0, None))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{url}: its index is none ({error!r})") from error
        return found

    def _header(self, path: str) -> list[Row]:
        size = int(self._fs.info(path)["size"])
        length = header_length(path, _fetched(self._fs, path, 0, 8), size)
        return rows_of(path, _fetched(self._fs, path, 8, 8 + length), size)


class RemoteReader(BoxReader):
    """One file behind fsspec. Not thread-safe, though its own requests go side by side."""

    def __init__(self, fs: Any, path: str) -> None:
        self._begin(Path(path))
        self._fs, self._name = fs, path
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _fill(self, values: Tensor, at: int) -> None:
        into = values.view(-1).view(torch.uint8).numpy().data
        starts = range(0, len(into), RANGE)
        if len(starts) < 2:
            self._range(into, at, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE)
        for _ in self._pool.map(lambda start: self._range(into, at, start), starts):
            pass

    def _range(self, into: memoryview, at: int, start: int) -> None:
        part = into[start : start + RANGE]
        found = _fetched(self._fs, self._name, at + start, at + start + len(part))
        if len(found) != len(part):
            raise EOFError
        part[:] = found


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{url} cannot be opened: {error}") from error
    return fs, root.rstrip("/")


def _listed(fs: Any, root: str, url: str) -> list[str]:
    try:
        return sorted(str(path) for path in fs.ls(root, detail=False))
    except Exception as error:  # each filesystem has its own
        raise ConfigError(f"{url} cannot be listed: {type(error).__name__}: {error}") from error


def _fetched(fs: Any, path: str, start: int, stop: int | None) -> bytes:
    try:
        found: bytes = fs.cat_file(path, start=start, end=stop)
    except Exception as error:  # as above
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return found

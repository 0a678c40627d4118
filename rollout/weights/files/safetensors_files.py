"""Boxes of tensors from safetensors files."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.box_reader import BoxReader, MappedReader
from rollout.weights.files.shards import REPAIR, Shards

META = "__metadata__"  # what a header has beside tensors
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFiles:
    """Opens every shard on construction, which checks its header and length."""

    def __init__(self, shards: Shards, *, mapped: bool) -> None:
        self._reader = MappedReader if mapped else BoxReader
        self._shards = shards
        self._readers: dict[Path, BoxReader] = {}
        self._where: dict[str, Path] = {}
        self._rows: dict[str, Row] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in shards.files:
                self._open(path)
            self._check_index()
            undo.pop_all()

    def metadata(self) -> dict[str, TensorMeta]:
        return {name: row.meta for name, row in self._rows.items()}

    def read(self, name: str, box: Box) -> Tensor:
        row = self._rows[name]
        reader = self._readers[self._where[name]]
        return reader.read(name, row.at, row.meta.dtype, row.meta.shape, box)

    def path_of(self, name: str) -> Path:
        """The file that has the tensor."""
        return self._where[name]

    def will_need(self, name: str) -> None:
        """Have the system begin to read a tensor; returns at once."""
        row = self._rows[name]
        self._readers[self._where[name]].will_need(row.at, row.meta.nbytes)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _open(self, path: Path) -> None:
        try:
            rows = _rows(path)
            self._readers[path] = self._reader(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error})") from error
        except (SafetensorError, ValueError) as error:
            raise ConfigError(
                f"{path} is truncated or no safetensors file ({error}); {REPAIR}"
            ) from error
        for name, row in rows.items():
            if self._shards.where.get(name, path.name) != path.name:
                continue  # the index places it in another shard
            if name in self._where:
                raise ConfigError(
                    f"{name} is in both {self._where[name]} and {path}; remove the stray file or "
                    "add an index"
                )
            self._where[name], self._rows[name] = path, row

    def _check_index(self) -> None:
        if absent := sorted(set(self._shards.where) - set(self._where)):
            name = absent[0]
            raise ConfigError(
                f"{self._shards.index}: {len(absent)} tensors are not in their files, "
                f"{name!r} in {self._shards.where[name]} first; {REPAIR}"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of a file, from byte ``at``."""

    meta: TensorMeta
    at: int


def _rows(path: Path) -> dict[str, Row]:
    """What the header says, in its order, once safetensors itself has found it sound."""
    with path.open("rb") as file:  # first: safetensors says that what it may not open is not there
        with safe_open(str(path), framework="pt", device="cpu") as checked:
            names = list(checked.keys())
        length = int.from_bytes(file.read(8), "little")
        rows = {row.meta.name: row for row in rows_of(str(path), file.read(length))}
    return {name: rows[name] for name in names}


def rows_of(path: str, header: bytes, size: int | None = None) -> list[Row]:
    """The tensors of a header; of a file of ``size`` bytes, each is checked to lie in it."""
    try:
        said = json.loads(header)
        rows = [_row(path, len(header), name, one) for name, one in said.items() if name != META]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} is truncated or no safetensors file ({error!r})") from error
    for row in rows:
        if size is not None and not 0 <= row.at <= size - row.meta.nbytes:
            raise ConfigError(f"{path} ends within {row.meta.name}; {REPAIR}")
    return rows


def _row(path: str, length: int, name: str, said: Any) -> Row:
    dtype = DTYPES.get(said["dtype"])
    if dtype is None:
        raise ConfigError(f"{path}: {name} has the unsupported dtype {said['dtype']}")
    shape, (start, stop) = tuple(map(int, said["shape"])), said["data_offsets"]
    meta = TensorMeta(name, dtype, shape)
    if min((0, start, *shape)) < 0 or stop - start != meta.nbytes:
        raise ValueError(f"{name} has {stop - start} bytes for shape {shape}")
    return Row(meta, 8 + length + start)

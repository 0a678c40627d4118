"""Boxes of tensors from safetensors files."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.box_reader import BoxReader, MappedReader
from rollout.weights.files.shards import REPAIR, Shards

META = "__metadata__"  # what a header has beside tensors
MAX_HEADER = 100 << 20  # bytes, as safetensors has it
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
            rows = rows_of(str(path), *read_header(path))
            self._readers[path] = self._reader(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error})") from error
        for row in sorted(rows, key=lambda row: row.meta.name):
            name = row.meta.name
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


def read_header(path: Path) -> tuple[bytes, int]:
    """A file's header, and the length of the file.

    It is read, not mapped: a mapped page that the disk or a server of files fails to give ends the
    process by SIGBUS.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(header_length(str(path), file.read(8), size)), size


def header_length(path: str, first: bytes, size: int) -> int:
    """Of the header of a file of ``size`` bytes, whose ``first`` 8 say it."""
    length = int.from_bytes(first, "little")
    if not 0 < length <= min(MAX_HEADER, size - 8):
        raise ConfigError(
            f"{path} is truncated or no safetensors file (of its {size} bytes the header would be "
            f"{length}); {REPAIR}"
        )
    return length


def rows_of(path: str, header: bytes, size: int) -> list[Row]:
    """The tensors of a header, which have to fill the file of ``size`` bytes."""
    try:
        said = json.loads(header)
        rows = [_row(len(header), name, one) for name, one in said.items() if name != META]
        _check_filled(rows, 8 + len(header), size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(
            f"{path} is truncated or no safetensors file ({error}); {REPAIR}"
        ) from error
    return rows


def _check_filled(rows: list[Row], end: int, size: int) -> None:
    for row in sorted(rows, key=lambda row: (row.at, row.meta.nbytes)):
        if row.at != end:
            raise ValueError(f"{row.meta.name} does not begin where the tensor before it ends")
        end += row.meta.nbytes
        if end > size:
            raise ValueError(f"it ends within {row.meta.name}")
    if end < size:
        raise ValueError(f"it has {size - end} bytes behind its last tensor")


def _row(length: int, name: str, said: Any) -> Row:
    dtype = DTYPES.get(said["dtype"])
    if dtype is None:
        raise ConfigError(f"{name} has the unsupported dtype {said['dtype']}")
    shape, (start, stop) = tuple(map(int, said["shape"])), said["data_offsets"]
    meta = TensorMeta(name, dtype, shape)
    if any(type(number) is not int for number in (start, stop, *said["shape"])):
        raise ValueError(f"{name} has a place or a shape of no integers")
    if min((0, start, *shape)) < 0 or stop - start != meta.nbytes:
        raise ValueError(f"{name} has {stop - start} bytes for shape {shape}")
    return Row(meta, 8 + length + start)

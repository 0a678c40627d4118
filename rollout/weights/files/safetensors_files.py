"""Boxes of tensors from safetensors files, reading no byte that was not asked for."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.shards import REPAIR, Shards

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFiles:
    """Opens every shard on construction, which checks its header and length."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._stack = shards, ExitStack()
        self._handles: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in shards.files:
                self._open(path)
            self._check_index()
            undo.pop_all()

    def metadata(self) -> dict[str, TensorMeta]:
        return self._metadata

    @cached_property
    def _metadata(self) -> dict[str, TensorMeta]:
        return {name: self._meta(name, path) for name, path in self._where.items()}

    def read(self, name: str, box: Box) -> Tensor:
        path = self._where[name]
        handle = self._handles[path]
        try:
            if box == Box.full(self._metadata[name].shape):
                return _tensor(handle.get_tensor(name))
            return _tensor(handle.get_slice(name)[box.slices])
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: {name} cannot be read ({error}); {REPAIR}") from error

    def close(self) -> None:
        self._handles.clear()
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is truncated or no safetensors file ({error}); {REPAIR}"
            ) from error
        self._handles[path] = handle
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if self._shards.where.get(name, path.name) != path.name:
                continue  # the index places it in another shard
            if name in self._where:
                raise ConfigError(
                    f"{name} is in both {self._where[name]} and {path}; remove the stray file or "
                    "add an index"
                )
            self._where[name] = path

    def _check_index(self) -> None:
        if absent := sorted(set(self._shards.where) - set(self._where)):
            name = absent[0]
            raise ConfigError(
                f"{self._shards.index}: {len(absent)} tensors are not in their files, "
                f"{name!r} in {self._shards.where[name]} first; {REPAIR}"
            )

    def _meta(self, name: str, path: Path) -> TensorMeta:
        part = self._handles[path].get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ConfigError(f"{path}: {name} has the unsupported dtype {part.get_dtype()}")
        return TensorMeta(name, dtype, tuple(part.get_shape()))


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value

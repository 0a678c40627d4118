"""Boxes of tensors from ``torch.save`` files, never unpickled freely."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.box_reader import BoxReader, MappedReader
from rollout.weights.files.shards import REPAIR, Shards


class TorchFiles:
    """State dicts of ``.bin``, ``.pt`` or ``.pth`` files; only tensors are accepted in them."""

    def __init__(self, shards: Shards, *, mapped: bool) -> None:
        self._reader = MappedReader if mapped else BoxReader
        self._files: list[BoxReader] = []
        self._tensors: dict[str, Tensor] = {}  # on "meta" where its values are still in the file
        self._readers: dict[str, BoxReader] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            self._open(shards)
            undo.pop_all()

    def metadata(self) -> dict[str, TensorMeta]:
        return {n: TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor[box.slices]
        shape, reader = tuple(tensor.shape), self._readers[name]
        start = tensor.untyped_storage()._checkpoint_offset
        assert start is not None, "such tensors are refused when the file is opened"
        at = start + int(tensor.storage_offset()) * tensor.dtype.itemsize
        if tensor.is_contiguous():
            return reader.read(name, at, tensor.dtype, shape, box)
        # A view of other memory: all that it spans is read.
        steps = zip(shape, tensor.stride(), strict=True)
        spans = (1 + sum((n - 1) * step for n, step in steps),)
        whole = reader.read(name, at, tensor.dtype, spans, Box.full(spans))
        return whole.as_strided(shape, tensor.stride())[box.slices]

    def close(self) -> None:
        for reader in self._files:
            reader.close()
        self._tensors.clear()

    def _open(self, shards: Shards) -> None:
        for path in shards.files:
            values = _load(path)
            reader = self._reader(path)
            self._files.append(reader)
            for name, tensor in values.items():
                if shards.where.get(name, path.name) != path.name:
                    continue
                if name in self._tensors:
                    raise ConfigError(f"{path}: {name} is also in another file; remove one")
                if tensor.is_meta and tensor.untyped_storage()._checkpoint_offset is None:
                    raise ConfigError(f"{path}: {name} was saved without its values, on 'meta'")
                self._tensors[name], self._readers[name] = tensor, reader
        if absent := sorted(set(shards.where) - set(self._tensors)):
            raise ConfigError(f"{shards.index}: {absent[0]!r} is in none of its files; {REPAIR}")


def _load(path: Path) -> dict[str, Tensor]:
    try:
        # The format before zip files does not say where values lie; it is read whole.
        where = "meta" if is_zipfile(path) else "cpu"
        values = torch.load(path, map_location=where, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors, or is damaged, and is not loaded ({error}); convert "
            "it to safetensors"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is truncated or no torch file ({error}); {REPAIR}") from error
    if not isinstance(values, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) and v.layout is torch.strided
        for k, v in values.items()
    ):
        raise ConfigError(
            f"{path} is no state dict of tensors, all of them dense; save model.state_dict() alone"
        )
    return values

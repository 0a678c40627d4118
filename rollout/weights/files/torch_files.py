"""Boxes of tensors from ``torch.save`` files, mapped into memory and never unpickled freely."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.shards import REPAIR, Shards


class TorchFiles:
    """State dicts of ``.bin``, ``.pt`` or ``.pth`` files; only tensors are accepted in them."""

    def __init__(self, shards: Shards) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in shards.files:
            for name, tensor in _load(path).items():
                if shards.where.get(name, path.name) != path.name:
                    continue
                if name in self._tensors:
                    raise ConfigError(f"{path}: {name} is also in another file; remove one")
                self._tensors[name] = tensor
        if absent := sorted(set(shards.where) - set(self._tensors)):
            raise ConfigError(f"{shards.index}: {absent[0]!r} is in none of its files; {REPAIR}")

    def metadata(self) -> dict[str, TensorMeta]:
        return {n: TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box.slices]

    def close(self) -> None:
        self._tensors.clear()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        try:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # The format before zip files cannot be mapped; it is read whole.
            values = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors, or is damaged, and is not loaded ({error}); convert "
            "it to safetensors"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is truncated or no torch file ({error}); {REPAIR}") from error
    if not isinstance(values, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) and v.layout is torch.strided
        for k, v in values.items()
    ):
        raise ConfigError(
            f"{path} is no state dict of tensors, all of them dense; save model.state_dict() alone"
        )
    return values

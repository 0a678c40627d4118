"""Safetensors files by the package fastsafetensors: whole ones, by many threads.

It moves a whole file at a time to the rank's device. That is fast where a rank takes most of a file
and the disks are; of ranks that share a model each reads all of it, where ``safetensors`` reads a
rank's own boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.weights import Box, TensorMeta
from rollout.weights.files.safetensors_files import SafetensorsFiles
from rollout.weights.files.shards import Shards


class FastFiles:
    """Headers are checked on construction, as always; one file at a time is in memory."""

    def __init__(self, shards: Shards) -> None:
        try:
            self._package: Any = import_module("fastsafetensors")
        except ImportError as error:
            raise ConfigError(
                f"load_format='fastsafetensors' needs that package ({error}): pip install "
                "fastsafetensors, or use load_format='safetensors'"
            ) from error
        self._headers = SafetensorsFiles(shards, mapped=False)
        self._open: tuple[Path, Any] | None = None

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._headers.metadata()

    def read(self, name: str, box: Box) -> Tensor:
        """A view of what is on the device until the next file is asked for."""
        whole: Tensor = self._file(self._headers.path_of(name)).get_tensor(name)
        return whole[box.slices]

    def close(self) -> None:
        """Idempotent."""
        self._headers.close()
        self._end()

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._end()
            device, cuda = "cpu", torch.cuda  # whose functions have no types
            if cuda.is_available() and cuda.is_initialized():  # type: ignore[no-untyped-call]
                device = f"cuda:{cuda.current_device()}"  # a rank's own
            opened = self._package.fastsafe_open([str(path)], nogds=True, device=device)
            self._open = path, opened
        return self._open[1]

    def _end(self) -> None:
        held, self._open = self._open, None
        if held is not None:
            held[1].__exit__(None, None, None)

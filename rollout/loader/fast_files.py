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

_OPEN = 2  # files at a time: what belongs together may lie on either side of a shard's end


class FastFiles:
    """Headers are checked on construction, as always; the two files that were asked for last are in
    memory.
    """

    def __init__(self, shards: Shards) -> None:
        try:
            self._package: Any = import_module("fastsafetensors")
        except ImportError as error:
            raise ConfigError(
                f"load_format='fastsafetensors' needs that package ({error}): pip install "
                "fastsafetensors, or use load_format='safetensors'"
            ) from error
        self._headers = SafetensorsFiles(shards, mapped=False)
        self._open: dict[Path, Any] = {}  # the one that was asked for last comes last

    def metadata(self) -> Mapping[str, TensorMeta]:
        return self._headers.metadata()

    def read(self, name: str, box: Box) -> Tensor:
        """A copy on the device: whoever has one may read on, which may close the file of this."""
        whole: Tensor = self._file(self._headers.path_of(name)).get_tensor(name)
        return whole[box.slices].clone()

    def close(self) -> None:
        """Idempotent."""
        self._headers.close()
        while self._open:
            self._end_oldest()

    def _file(self, path: Path) -> Any:
        held = self._open.pop(path, None)
        if held is None:
            if len(self._open) == _OPEN:
                self._end_oldest()
            device, cuda = "cpu", torch.cuda  # whose functions have no types
            if cuda.is_available() and cuda.is_initialized():  # type: ignore[no-untyped-call]
                device = f"cuda:{cuda.current_device()}"  # a rank's own
            held = self._package.fastsafe_open([str(path)], nogds=True, device=device)
        self._open[path] = held
        return held

    def _end_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).__exit__(None, None, None)

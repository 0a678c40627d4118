"""A checkpoint directory, read by the caller tensor by tensor and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rollout.errors import ConfigError, SourceFailed
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weight_sync.trainer.sources.values import readable
from rollout.weights import Box, TensorMeta
from rollout.weights.files import open_weights


class DirectorySource:
    """The files that a cold start would read, opened while it is iterated.

    One tensor is in memory at a time. The directory must not change during the update: files are
    read and not mapped, so that one which gets shorter is a ``SourceFailed`` that names it, as all
    that is wrong with a file.
    """

    def __init__(self, path: Path, naming: Naming, agreement: RankGroup) -> None:
        self._path, self._naming, self.agreement = path, naming, agreement
        with _named(path):
            _, files = open_weights(path, mapped=False)
            held = list(files.metadata().values())
            files.close()
        stand_ins = ((m.name, torch.empty(m.shape, dtype=m.dtype, device="meta")) for m in held)
        self._metadata = tuple(
            TensorMeta(name, naming.dtype_of(name, t.dtype), tuple(t.shape))
            for name, t in naming.bind_stream(stand_ins)
        )
        if not self._metadata:
            raise SourceFailed(f"{path} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._naming.bind_stream(self._read()):
            yield name, tensor.to(self._naming.dtype_of(name, tensor.dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(meta.name, [Box.full(meta.shape)]) for meta in self._metadata]

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        with _named(self._path):
            _, files = open_weights(self._path, mapped=False)
            try:
                for meta in files.metadata().values():
                    tensor = files.read(meta.name, Box.full(meta.shape))
                    yield meta.name, readable(meta.name, tensor)
            finally:
                files.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What goes wrong with a file is the source's failure, whatever reads it."""
    try:
        yield
    except ConfigError as error:
        raise SourceFailed(str(error)) from error
    except OSError as error:
        raise SourceFailed(f"{path} cannot be read: {error}") from error

"""A checkpoint directory, read by the caller tensor by tensor and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollout.errors import ConfigError, SourceFailed
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weight_sync.trainer.sources.values import readable
from rollout.weights import Box, TensorMeta
from rollout.weights.files import Files, codes_of, open_weights
from rollout.weights.names import is_idle_bias
from rollout.weights.packed_rows import FileCodes, pack_rows, packed_shape


class DirectorySource:
    """The files that a cold start would read, opened while it is iterated.

    One tensor is in memory at a time; a quantised one goes as its codes where the engine holds it
    so. The directory must not change during the update: files are read and not mapped, so that one
    which gets shorter is a ``SourceFailed`` that names it, as all that is wrong with a file.
    """

    def __init__(self, path: Path, naming: Naming, agreement: RankGroup) -> None:
        self._path, self._naming, self.agreement = path, naming, agreement
        with _named(path):
            _, files = open_weights(path, mapped=False)
            held = self._held(files)
            files.close()
        with _named(path):
            stand_ins = [self._stand_in(files, meta) for meta in held]
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

    def _held(self, files: Files) -> list[TensorMeta]:
        return [
            meta
            for name, meta in files.metadata().items()
            if not is_idle_bias(
                self._naming.name_of(name) or "",
                self._naming.known,
                partial(files.read, name, Box.full(meta.shape)),
            )
        ]

    def _stand_in(self, files: Files, meta: TensorMeta) -> tuple[str, Tensor]:
        found, shape, dtype = self._codes(files, meta.name), meta.shape, meta.dtype
        if found is not None:
            shape, dtype = packed_shape(shape, found.scheme), torch.uint8
        return meta.name, torch.empty(shape, dtype=dtype, device="meta")

    def _codes(self, files: Files, name: str) -> FileCodes | None:
        """The file's own codes, where the engine holds the tensor in that grid."""
        scheme = self._naming.schemes.get(self._naming.name_of(name) or "")
        return next((found for found in codes_of(files, name) if found.scheme is scheme), None)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        with _named(self._path):
            _, files = open_weights(self._path, mapped=False)
            try:
                for meta in self._held(files):
                    box, codes = Box.full(meta.shape), self._codes(files, meta.name)
                    tensor = (
                        files.read(meta.name, box) if codes is None else pack_rows(*codes.read(box))
                    )
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

"""A checkpoint directory, read by the caller tensor by tensor and streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from rollout.errors import ConfigError, SourceFailed
from rollout.loader.local_files import found_format, open_files, weight_paths
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weight_sync.trainer.sources.values import readable
from rollout.weights import Box, Shape, TensorMeta
from rollout.weights.expert_names import expert_part
from rollout.weights.files import AsTheyWere, Files, codes_of
from rollout.weights.names import is_idle_bias
from rollout.weights.packed_rows import FileCodes, pack_rows, packed_shape


class DirectorySource:
    """The files that a cold start would read, opened while it is iterated.

    One tensor is in memory at a time; a quantised one goes as its codes where the engine holds it
    so. Files are read and not mapped: one that gets shorter, or is written meanwhile, is a
    ``SourceFailed`` that names it, as all that is wrong with a file.
    """

    def __init__(self, path: Path, naming: Naming, agreement: RankGroup) -> None:
        self._path, self._naming, self.agreement = path, naming, agreement
        with _named(path):
            self._format = found_format(path)
            self._as_they_were = AsTheyWere(weight_paths(path, self._format))
            files = self._open()
            sent = [one for meta in self._held(files) for one in self._sent(files, meta)]
            files.close()
        self._metadata = tuple(
            TensorMeta(name, naming.dtype_of(name, t.dtype), tuple(t.shape))
            for name, t in naming.bind_stream((one.name, one.stand_in()) for one in sent)
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

    def _open(self) -> Files:
        return open_files(self._path, self._format, mapped=False)

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

    def _sent(self, files: Files, meta: TensorMeta) -> Iterator[_Sent]:
        """What goes of one of the files' tensors: its floats or, where the engine holds it so, the
        codes; of experts in one tensor those of each by itself."""
        name, shape, box = meta.name, meta.shape, Box.full(meta.shape)
        if (codes := self._codes(files, name, name)) is not None:
            yield _Sent.of_codes(name, shape, codes, box)
        elif (codes := self._codes(files, name, expert_part(name, 0))) is not None:
            experts, columns, rows = shape
            for index in range(experts):
                box = Box((index, 0, 0), (index + 1, columns, rows))
                yield _Sent.of_codes(expert_part(name, index), (rows, columns), codes, box)
        else:
            yield _Sent(name, shape, meta.dtype, partial(files.read, name, box))

    def _codes(self, files: Files, name: str, sent: str) -> FileCodes | None:
        """The file's own codes, where the engine holds the tensor that is ``sent`` in that grid."""
        scheme = self._naming.schemes.get(self._naming.name_of(sent) or "")
        return next((found for found in codes_of(files, name) if found.scheme is scheme), None)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        with _named(self._path):
            files = self._open()
            try:
                for meta in self._held(files):
                    for sent in self._sent(files, meta):
                        yield sent.name, readable(sent.name, sent.read())
                self._as_they_were.check()
            finally:
                files.close()


@dataclass(frozen=True, slots=True)
class _Sent:
    """One tensor as it goes: floats, or codes and scales in bytes."""

    name: str
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of_codes(cls, name: str, shape: Shape, codes: FileCodes, box: Box) -> Self:
        """Those of a weight [N, K] = ``shape``, which the file has in ``box``."""
        packed = packed_shape(shape, codes.scheme)
        return cls(name, packed, torch.uint8, lambda: pack_rows(*codes.read(box)))

    def stand_in(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What goes wrong with a file is the source's failure, whatever reads it."""
    try:
        yield
    except ConfigError as error:
        raise SourceFailed(str(error)) from error
    except OSError as error:
        raise SourceFailed(f"{path} cannot be read: {error}") from error

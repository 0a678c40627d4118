"""A checkpoint directory, read by the caller tensor by tensor and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rollout.errors import ConfigError, SourceFailed
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import NameOf, bind_stream, wire_dtype
from rollout.weight_sync.trainer.sources.values import readable
from rollout.weights import Box, TensorMeta
from rollout.weights.files import open_weights
from rollout.weights.names import file_form


class DirectorySource:
    """The files that a cold start would read, opened while it is iterated.

    One tensor is in memory at a time. The directory must not change during the update: files are
    read and not mapped, so that one which gets shorter is a ``SourceFailed`` that names it, as all
    that is wrong with a file.
    """

    def __init__(
        self,
        path: Path,
        aliases: Mapping[str, str],
        dtype: torch.dtype | None,
        agreement: RankGroup,
        name_of: NameOf = file_form,
    ) -> None:
        self.agreement, self._name_of = agreement, name_of
        self._path, self._aliases, self._dtype = path, aliases, dtype
        with _named(path):
            _, files = open_weights(path, mapped=False)
            held = list(files.metadata().values())
            files.close()
        stand_ins = ((m.name, torch.empty(m.shape, dtype=m.dtype, device="meta")) for m in held)
        self._metadata = tuple(
            TensorMeta(name, wire_dtype(name, t.dtype, dtype), tuple(t.shape))
            for name, t in bind_stream(stand_ins, aliases, name_of)
        )
        if not self._metadata:
            raise SourceFailed(f"{path} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bind_stream(self._read(), self._aliases, self._name_of):
            yield name, tensor.to(wire_dtype(name, tensor.dtype, self._dtype))

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

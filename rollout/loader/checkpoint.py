"""A checkpoint as a stream of ``(name, LazyTensor)``, whatever its format and wherever it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from rollout.errors import ConfigError
from rollout.loader.dummy import DummyFiles
from rollout.loader.hub import resolve_model
from rollout.weights import Box, LazyTensor, TensorMeta
from rollout.weights.files import Files, open_weights

FORMATS = ("auto", "safetensors", "pt", "dummy")


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An opened checkpoint. Its ``LazyTensor``s are readable until ``close``.

    ``bytes_read`` counts the bytes of every box that was read. Not thread-safe.
    """

    def __init__(self, directory: Path, load_format: str, files: Files, progress: bool) -> None:
        self.directory, self.load_format = directory, load_format
        self.bytes_read = 0
        self._files, self._progress = files, progress

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Names, dtypes and shapes, in stream order; reads headers only."""
        return tuple(self._files.metadata().values())

    def items(self) -> Iterator[tuple[str, LazyTensor]]:
        """Every tensor once; nothing is read before a ``LazyTensor`` is asked for a box."""
        metas: Sequence[TensorMeta] = self.metadata()
        for meta in _with_progress(metas) if self._progress else metas:
            yield meta.name, LazyTensor(meta.shape, meta.dtype, self._reader(meta))

    def close(self) -> None:
        """Close all files; idempotent."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reader(self, meta: TensorMeta) -> _Read:
        return _Read(self, self._files, meta)


class _Read:
    """The ``read`` of one ``LazyTensor``: counts what passes."""

    def __init__(self, owner: Checkpoint, files: Files, meta: TensorMeta) -> None:
        self.owner, self.files, self.meta = owner, files, meta

    def __call__(self, box: Box) -> Tensor:
        if not box.fits(self.meta.shape):
            raise ValueError(f"{self.meta.name}: box {box} lies outside {self.meta.shape}")
        part = self.files.read(self.meta.name, box)
        self.owner.bytes_read += part.numel() * part.element_size()
        return part


def open_checkpoint(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    *,
    token: str | None = None,
    metadata: Sequence[TensorMeta] = (),
    seed: int = 0,
    progress: bool = False,
) -> Checkpoint:
    """Open the checkpoint at a directory or of a hub id.

    ``load_format`` auto (safetensors, else .bin/.pt) | safetensors | pt | dummy. ``dummy`` reads
    no weight file: it makes up values for ``metadata`` (the model's complete set) that depend on
    name, position and ``seed`` alone, so ranks agree. ``token`` is sent to the hub; None leaves it
    to huggingface_hub's own settings (``HF_TOKEN``). ``progress`` draws a bar on stderr.
    Raises ``ConfigError`` naming the file or repository and the remedy.
    """
    if load_format not in FORMATS:
        raise ConfigError(
            f"Load format `{load_format}` is not supported; use one of {', '.join(FORMATS)}"
        )
    directory = resolve_model(model, revision, load_format, token)
    return open_directory(directory, load_format, metadata=metadata, seed=seed, progress=progress)


def open_directory(
    directory: Path,
    load_format: str = "auto",
    *,
    metadata: Sequence[TensorMeta] = (),
    seed: int = 0,
    progress: bool = False,
) -> Checkpoint:
    """As ``open_checkpoint``, of a directory that need not have a ``config.json``."""
    if load_format == "dummy":
        if not metadata:
            raise ConfigError("load_format='dummy' needs the model's metadata: names and shapes")
        return Checkpoint(directory, "dummy", DummyFiles(metadata, seed), progress)
    kind, files = open_weights(directory, load_format)
    return Checkpoint(directory, kind.name, files, progress)


def _with_progress(metas: Sequence[TensorMeta]) -> Iterator[TensorMeta]:
    from tqdm import tqdm

    with tqdm(total=len(metas), desc="Loading weights", unit="tensor") as bar:
        for meta in metas:
            yield meta
            bar.update()

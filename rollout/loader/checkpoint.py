"""A checkpoint as a stream of ``(name, LazyTensor)``, whatever its format and wherever it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Self

from torch import Tensor

from rollout.errors import ConfigError
from rollout.loader.dummy import DummyFiles
from rollout.loader.fast_files import FastFiles
from rollout.loader.hub import resolve_model
from rollout.loader.local_files import found_format, open_files, weight_paths
from rollout.loader.registry import LoadRequest, find_loader, register_loader
from rollout.loader.remote import is_remote, open_remote
from rollout.weights import Box, LazyTensor, TensorMeta
from rollout.weights.files import (
    AsTheyWere,
    Files,
    codes_of,
    unpacked,
    weight_shards,
)
from rollout.weights.packed_rows import FileCodes

AHEAD = 256 << 20  # bytes that the system is asked to read before they are taken


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """An opened checkpoint. Its ``LazyTensor``s are readable until ``close``.

    ``bytes_read`` counts the bytes of every box that was read. Not thread-safe.
    """

    def __init__(
        self,
        location: str,
        load_format: str,
        files: Files,
        progress: bool,
        as_they_were: AsTheyWere,
    ) -> None:
        self.location, self.load_format = location, load_format
        self.bytes_read = 0
        self._files, self._progress = files, progress
        self._as_they_were = as_they_were

    @property
    def directory(self) -> Path:
        return Path(self.location)

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Names, dtypes and shapes, in stream order; reads headers only."""
        return tuple(self._files.metadata().values())

    def read(self, name: str) -> Tensor:
        """All of one tensor, in memory of its own."""
        meta = self._files.metadata()[name]
        return self._reader(meta)(Box.full(meta.shape)).clone()

    def items(self) -> Iterator[tuple[str, LazyTensor]]:
        """Every tensor once; nothing is read before a ``LazyTensor`` is asked for a box.

        What comes next is on its way from the disk meanwhile. Raises ``ConfigError`` at the end
        where a file was written since this was opened.
        """
        metas: Sequence[TensorMeta] = self.metadata()
        ahead = _Ahead(self._files, metas)
        for meta in _with_progress(metas) if self._progress else metas:
            ahead.passed(meta)
            codes = tuple(map(self._counted, codes_of(self._files, meta.name)))
            yield meta.name, LazyTensor(meta.shape, meta.dtype, self._reader(meta), codes)
        self._as_they_were.check()

    def close(self) -> None:
        """Close all files; idempotent."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _counted(self, found: FileCodes) -> FileCodes:
        def read(box: Box) -> tuple[Tensor, Tensor]:
            codes, scales = found.read(box)
            self.bytes_read += codes.nbytes + scales.nbytes
            return codes, scales

        return FileCodes(found.scheme, read)

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


class _Ahead:
    """Tells files which tensors are due, ``AHEAD`` bytes before they are; those that listen."""

    def __init__(self, files: Files, metas: Sequence[TensorMeta]) -> None:
        self._will_need = getattr(files, "will_need", None)
        self._left = deque(metas if self._will_need is not None else ())
        self._room = AHEAD

    def passed(self, meta: TensorMeta) -> None:
        while self._left and self._room > 0 and self._will_need is not None:
            due = self._left.popleft()
            self._will_need(due.name)
            self._room -= due.nbytes
        self._room += meta.nbytes


@register_loader("auto")
def _auto(request: LoadRequest) -> Files:
    name = _found(request.location)
    return find_loader(name)(replace(request, load_format=name))


def _found(location: str) -> str:
    """The format of a URL's files, or a directory's: of ranks' own, safetensors, .bin or .pt."""
    if is_remote(location):
        return "safetensors"
    return found_format(Path(location))


def _paths(location: str, load_format: str) -> Sequence[Path]:
    """The files of this machine that these formats read."""
    kind = "safetensors" if load_format == "fastsafetensors" else load_format
    if is_remote(location) or kind not in ("safetensors", "pt", "sharded_state"):
        return ()
    return weight_paths(Path(location), kind)


@register_loader("safetensors")
@register_loader("pt")
@register_loader("sharded_state")
def _files(request: LoadRequest) -> Files:
    if is_remote(request.location):
        if request.load_format == "safetensors":
            return open_remote(request.location)
        raise ConfigError(f"{request.location}: only safetensors are read by ranges; use them")
    return open_files(request.directory, request.load_format)


@register_loader("fastsafetensors")
def _fast(request: LoadRequest) -> Files:
    if is_remote(request.location):
        raise ConfigError(f"{request.location}: fastsafetensors reads files; use safetensors")
    _, shards = weight_shards(request.directory, "safetensors")
    return unpacked(FastFiles(shards), request.directory)


@register_loader("dummy")
def _dummy(request: LoadRequest) -> Files:
    if not request.metadata:
        raise ConfigError("load_format='dummy' needs the model's metadata: names and shapes")
    return DummyFiles(request.metadata, request.seed, request.device)


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
    """Open the checkpoint at a directory, of a hub id, or at a URL.

    ``load_format`` auto (safetensors, else .bin/.pt) | safetensors | pt | sharded_state | dummy, or
    what ``register_loader`` made known. ``dummy`` reads no weight file: it makes up values for
    ``metadata`` (the model's complete set) that depend on name, position and ``seed`` alone, so
    ranks agree. ``token`` is sent to the hub; None leaves it to huggingface_hub's own settings
    (``HF_TOKEN``). ``progress`` draws a bar on stderr.
    Raises ``ConfigError`` naming the file or repository and the remedy.
    """
    find_loader(load_format)
    if not is_remote(model):
        model = str(resolve_model(model, revision, load_format, token))
    return open_location(model, load_format, metadata=metadata, seed=seed, progress=progress)


def open_location(
    location: str,
    load_format: str = "auto",
    *,
    metadata: Sequence[TensorMeta] = (),
    seed: int = 0,
    progress: bool = False,
    device: str = "cpu",
) -> Checkpoint:
    """As ``open_checkpoint``, of a directory, that need not have a ``config.json``, or a URL.

    ``device``: where what is read will lie; made-up values are made there.
    """
    find_loader(load_format)
    load_format = _found(location) if load_format == "auto" else load_format
    request = LoadRequest(
        location=location, load_format=load_format, metadata=metadata, seed=seed, device=device
    )
    as_they_were = AsTheyWere(_paths(location, load_format))
    files = find_loader(load_format)(request)
    if not all(callable(getattr(files, verb, None)) for verb in ("metadata", "read", "close")):
        raise ConfigError(
            f"the loader of load_format={load_format!r} returned a {type(files).__name__}; it has "
            "to return an object with metadata(), read(name, box) and close()"
        )
    return Checkpoint(location, load_format, files, progress, as_they_were)


def _with_progress(metas: Sequence[TensorMeta]) -> Iterator[TensorMeta]:
    from tqdm import tqdm

    with tqdm(total=len(metas), desc="Loading weights", unit="tensor") as bar:
        for meta in metas:
            yield meta
            bar.update()

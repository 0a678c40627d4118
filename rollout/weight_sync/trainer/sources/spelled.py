"""A source whose names are transformers' own in memory, seen in file form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

from torch import Tensor

from rollout.errors import WeightMismatch, some
from rollout.weights import Box, TensorMeta, TensorPiece
from rollout.weights.spellings import Spellings, Splitter


class SpelledSource:
    """Splits what ``inner`` yields (fused experts, renamed modules) into file-form tensors.

    Views of what was gathered: no copy, but for a transposed expert, and parts that were cut anew.
    So what is announced, sent and digested is the file form whichever spelling the trainer has.
    Lockstep is ``inner``'s: the parts of one tensor come one after the other, on every rank the
    same. Raises ``WeightMismatch`` for a fused tensor of another shape, and for parts that were cut
    anew and are not all there.
    """

    def __init__(self, inner: Any, spellings: Spellings) -> None:
        self.inner, self.agreement = inner, inner.agreement
        self._spellings = spellings

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        metadata: tuple[TensorMeta, ...] | None = self.inner.metadata()
        if metadata is None:
            return None
        splitter = Splitter(self._spellings)
        found = []
        for meta in metadata:
            if fused := self._spellings.fused.get(meta.name):
                splitter.meet(fused, meta.shape)
            for name, shape in self._spellings.split_shape(meta.name, meta.shape):
                found.append(TensorMeta(name, meta.dtype, shape))
        return tuple(found)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        splitter = Splitter(self._spellings)
        items = iter(self.inner)
        # An iterator that ends early must close the inner one: it may hold gathered parameters.
        with closing(items) if hasattr(items, "close") else nullcontext():
            for name, tensor in items:
                for part, value in splitter.split(name, tensor):
                    assert isinstance(value, Tensor), f"{part}: a source yields tensors"
                    yield part, value
        if problems := splitter.left():
            raise WeightMismatch(some(problems, between="; "), problems=problems)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        shapes = {meta.name: meta.shape for meta in self.inner.metadata() or ()}
        result: dict[str, list[Box]] = {}
        for name, boxes in self.inner.local_boxes():
            if name in shapes and self._spellings.cut_of(name, shapes[name]) is not None:
                result[name] = []  # it is joined with others before it is cut: gathered
                continue
            fused = self._spellings.fused.get(name)
            if fused is None:
                result[self._spellings.renames.get(name, name)] = list(boxes)
                continue
            for part, _ in fused.boxes():
                result[part] = []
            for box in boxes:
                for part, inside in fused.split_box(box, shapes.get(name, fused.shape)):
                    result[part].append(inside)
        return list(result.items())


class LocalSpelledSource(SpelledSource):
    """The same, of a source that reads its own boxes."""

    def __init__(self, inner: Any, spellings: Spellings) -> None:
        super().__init__(inner, spellings)
        self._origin = {part: meta.name for meta, part in self._parts()}
        self._last: tuple[str, dict[str, list[tuple[Box, Tensor]]]] = ("", {})

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        origin = self._origin.get(name, name)
        if self._last[0] != origin:
            self._last = (origin, self._split(origin))
        return self._last[1].get(name, [])

    def _parts(self) -> Iterator[tuple[TensorMeta, str]]:
        for meta in self.inner.metadata() or ():
            for part, _ in self._spellings.split_shape(meta.name, meta.shape):
                yield meta, part

    def _split(self, origin: str) -> dict[str, list[tuple[Box, Tensor]]]:
        """The boxes of every file-form part of one tensor, as views where it is not transposed."""
        shapes = {meta.name: meta.shape for meta, _ in self._parts() if meta.name == origin}
        found: dict[str, list[tuple[Box, Tensor]]] = {}
        if self._spellings.cut_of(origin, shapes[origin]) is not None:
            return found  # as ``local_boxes`` says
        for box, values in self.inner.local_values(origin):
            piece = TensorPiece(shapes[origin], values.dtype, box, values)
            for part, value in Splitter(self._spellings).split(origin, piece):
                assert isinstance(value, TensorPiece)
                found.setdefault(part, []).append((value.box, value.values))
        return found

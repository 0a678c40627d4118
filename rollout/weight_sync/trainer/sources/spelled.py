"""A source whose names are transformers' own in memory, seen in file form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any

from torch import Tensor

from rollout.errors import WeightMismatch, some
from rollout.weight_sync.trainer.sources.base import AtHandSource, held_values
from rollout.weights import Box, TensorMeta, TensorPiece
from rollout.weights.spellings import Spellings, Splitter

_Parts = dict[str, list[tuple[Box, Tensor]]]  # by file-form name


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

    def at_hand(self) -> list[tuple[str, Tensor]] | None:
        held = self.inner.at_hand() if isinstance(self.inner, AtHandSource) else None
        if held is None:
            return None
        splitter = Splitter(self._spellings)
        found: list[tuple[str, Any]] = []
        for name, tensor in held:
            found += splitter.split(name, tensor)
        whole = [tensor for _, tensor in held]
        return found if not splitter.left() and _all_lie_in((x for _, x in found), whole) else None

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


def _all_lie_in(views: Iterable[Any], tensors: Iterable[Tensor]) -> bool:
    """Whether everything is a view: what was transposed or joined is gone before it is read."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return all(view.untyped_storage().data_ptr() in memory for view in views)


class LocalSpelledSource(SpelledSource):
    """The same, of a source that reads its own boxes."""

    def __init__(self, inner: Any, spellings: Spellings) -> None:
        super().__init__(inner, spellings)
        self._origin = {part: meta.name for meta, part in self._parts()}
        self._last: tuple[str, _Parts] = ("", {})
        self._held: tuple[str, _Parts | None] = ("", None)

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        origin = self._origin.get(name, name)
        if self._last[0] != origin:
            self._last = (origin, self._split(origin, self.inner.local_values(origin)))
        return self._last[1].get(name, [])

    def held_values(self, name: str) -> list[tuple[Box, Tensor]] | None:
        origin = self._origin.get(name, name)
        if self._held[0] != origin:
            self._held = (origin, self._held_parts(origin))
        return None if self._held[1] is None else self._held[1].get(name, [])

    def _held_parts(self, origin: str) -> _Parts | None:
        held = held_values(self.inner, origin)
        if held is None:
            return None
        found = self._split(origin, held)
        views = (values for parts in found.values() for _, values in parts)
        return found if _all_lie_in(views, [values for _, values in held]) else None

    def _parts(self) -> Iterator[tuple[TensorMeta, str]]:
        for meta in self.inner.metadata() or ():
            for part, _ in self._spellings.split_shape(meta.name, meta.shape):
                yield meta, part

    def _split(self, origin: str, local: Sequence[tuple[Box, Tensor]]) -> _Parts:
        """The boxes of every file-form part of one tensor, as views where it is not transposed."""
        shapes = {meta.name: meta.shape for meta, _ in self._parts() if meta.name == origin}
        found: _Parts = {}
        if self._spellings.cut_of(origin, shapes[origin]) is not None:
            return found  # as ``local_boxes`` says
        for box, values in local:
            piece = TensorPiece(shapes[origin], values.dtype, box, values)
            for part, value in Splitter(self._spellings).split(origin, piece):
                assert isinstance(value, TensorPiece)
                found.setdefault(part, []).append((value.box, value.values))
        return found

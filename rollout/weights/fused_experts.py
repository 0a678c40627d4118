"""Experts of a layer that a trainer, or a file, has in two tensors.

transformers 5 keeps the experts of a layer in two tensors, ``X.experts.gate_up_proj`` [E, 2 I, H]
(rows: gate, then up) and ``X.experts.down_proj`` [E, H, I], and writes them to files one by one:
``X.experts.{i}.gate_proj.weight`` [I, H] and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import (
    Box,
    LazyTensor,
    Shape,
    SparsePatch,
    TensorPiece,
    WeightValue,
)
from rollout.weights.expert_names import EXPERT_NAMES, STACKED, memory_name
from rollout.weights.fused_boxes import patch_of
from rollout.weights.packed_rows import FileCodes


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """One tensor [E, rows, columns] that holds linears of all experts of one layer.

    ``parts``: (component of the file name, first row, past the last one), which tile the rows;
    expert i's part is the tensor ``prefix.i.component.weight``. ``sibling`` is the other fused
    tensor of the layer. Stored transposed, [E, columns, rows], it is recognised by its shape; where
    both shapes are one it is read as transformers 5 has it, and refused beside a sibling that
    proves to be transposed. ``transposed``: whether it always is; None where shapes tell.
    """

    name: str
    shape: Shape
    prefix: str
    parts: tuple[tuple[str, int, int], ...]
    sibling: str
    transposed: bool | None = None

    @property
    def ambiguous(self) -> bool:
        return self.transposed is None and self.shape[1] == self.shape[2]

    def is_transposed(self, shape: Shape) -> bool:
        """Whether a value of ``shape`` is stored transposed; ``WeightMismatch`` if neither."""
        experts, rows, columns = self.shape
        if self.transposed is not True and tuple(shape) == self.shape:
            return False
        if self.transposed is not False and tuple(shape) == (experts, columns, rows):
            return True
        needs = {
            None: f"{self.shape} (or, transposed, {(experts, columns, rows)})",
            True: f"{(experts, columns, rows)}",
            False: f"{self.shape}",
        }
        raise WeightMismatch(
            f"{self.name}: has shape {tuple(shape)}, the model needs {needs[self.transposed]}"
        )

    def boxes(self, experts: range | None = None) -> Iterator[tuple[str, Box]]:
        """Each file-form tensor, expert by expert, and its box of this one (not transposed)."""
        for index in experts if experts is not None else range(self.shape[0]):
            for part, start, stop in self.parts:
                box = Box((index, start, 0), (index + 1, stop, self.shape[2]))
                yield f"{self.prefix}.{index}.{part}.weight", box

    def split_shape(self) -> list[tuple[str, Shape]]:
        """Each file-form tensor and its shape."""
        return [(name, box.shape[1:]) for name, box in self.boxes()]

    def split(self, value: WeightValue) -> Iterator[tuple[str, WeightValue]]:
        """``value`` as file-form values: views where it is a tensor, reads of boxes where lazy."""
        transposed = self.is_transposed(tuple(value.shape))
        if isinstance(value, TensorPiece):
            yield from self._split_piece(value, transposed)
            return
        for name, box in self.boxes():
            yield name, _part(self.name, value, box, transposed)

    def split_box(self, box: Box, shape: Shape) -> Iterator[tuple[str, Box]]:
        """The file-form boxes that ``box`` of a value of ``shape`` holds."""
        plain = _swapped(box) if self.is_transposed(shape) else box
        for name, whole in self.boxes(range(plain.starts[0], plain.stops[0])):
            common = whole.intersect(plain)
            if common is not None:
                back = tuple(-start for start in whole.starts)
                relative = common.shifted(back)
                yield name, Box(relative.starts[1:], relative.stops[1:])

    def _split_piece(
        self, piece: TensorPiece, transposed: bool
    ) -> Iterator[tuple[str, TensorPiece]]:
        if not piece.box.fits(piece.shape) or tuple(piece.values.shape) != piece.box.shape:
            raise WeightMismatch(
                f"{self.name}: a piece of shape {tuple(piece.values.shape)} came for the box "
                f"{piece.box.starts}..{piece.box.stops} of {tuple(piece.shape)}"
            )
        values = piece.values.transpose(1, 2) if transposed else piece.values
        inside = _swapped(piece.box) if transposed else piece.box
        back = tuple(-start for start in inside.starts)
        for name, whole in self.boxes(range(inside.starts[0], inside.stops[0])):
            common = whole.intersect(inside)
            if common is None:
                continue
            relative = common.shifted(tuple(-start for start in whole.starts))
            yield (
                name,
                TensorPiece(
                    whole.shape[1:],
                    piece.dtype,
                    Box(relative.starts[1:], relative.stops[1:]),
                    values[common.shifted(back).slices].reshape(relative.shape[1:]),
                ),
            )


def fuse_experts(prefix: str, linears: Mapping[str, Mapping[int, Shape]]) -> Iterable[FusedExperts]:
    """Both fused tensors of the layer ``prefix``, if its experts are numbered and shaped alike.

    ``linears``: by component of the file name, the shape of each expert's.
    """
    for (both, down), transposed in STACKED.items():
        if set(linears) == {both, down}:
            return _restack(prefix, linears, both, down, transposed)
    for gate, up, down in (names.linears for names in EXPERT_NAMES):
        if set(linears) not in ({gate, up, down}, {up, down}):
            continue
        gated = gate in linears
        count = len(linears[up])
        shapes = {part: set(of.values()) for part, of in linears.items()}
        if any(set(of) != set(range(count)) for of in linears.values()):
            return ()
        if any(len(found) != 1 for found in shapes.values()):
            return ()
        (inner, hidden), (out, back) = linears[up][0], linears[down][0]
        if (gated and linears[gate][0] != (inner, hidden)) or (out, back) != (hidden, inner):
            return ()
        memory = memory_name(prefix)
        names = (f"{memory}.{'gate_up_proj' if gated else 'up_proj'}", f"{memory}.down_proj")
        halves = ((gate, 0, inner), (up, inner, 2 * inner)) if gated else ((up, 0, inner),)
        return (
            FusedExperts(names[0], (count, halves[-1][2], hidden), prefix, halves, names[1]),
            FusedExperts(names[1], (count, hidden, inner), prefix, ((down, 0, hidden),), names[0]),
        )
    return ()


def _restack(
    prefix: str,
    linears: Mapping[str, Mapping[int, Shape]],
    both: str,
    down: str,
    transposed: bool,
) -> Iterable[FusedExperts]:
    """The same of experts that are stacked in files: under the names of files and of memory."""
    count = len(linears[both])
    alike = all(len({*linears[part].values()}) == 1 for part in (both, down))
    if not alike or any(set(linears[part]) != set(range(count)) for part in (both, down)):
        return
    spelt = {(f"{prefix}.gate_up_proj", f"{prefix}.down_proj")}
    if both == "input_linear":
        block = prefix.removesuffix("experts")
        spelt.add((f"{block}{both}.weight", f"{block}{down}.weight"))
    for names in sorted(spelt):
        for part, name, sibling in ((both, *names), (down, *names[::-1])):
            rows, columns = linears[part][0]
            shape, parts = (count, rows, columns), ((part, 0, rows),)
            yield FusedExperts(name, shape, prefix, parts, sibling, transposed)


def _swapped(box: Box) -> Box:
    (a, b, c), (d, e, f) = box.starts, box.stops
    return Box((a, c, b), (d, f, e))


def _part(
    name: str, value: Tensor | LazyTensor | SparsePatch, box: Box, transposed: bool
) -> Tensor | LazyTensor | SparsePatch:
    """``value[box]`` without its first dimension; ``box`` has one index there."""
    stored = _swapped(box) if transposed else box
    if isinstance(value, Tensor):
        part = value[stored.slices].squeeze(0)
        return part.T.contiguous() if transposed else part
    if isinstance(value, LazyTensor):
        return _lazy(value, box.shape[1:], stored, transposed)
    if transposed:
        raise WeightMismatch(f"{name}: a patch of a transposed tensor is not supported")
    return patch_of(name, value, box, box.shape[1:])


def _lazy(value: LazyTensor, shape: Shape, stored: Box, transposed: bool) -> LazyTensor:
    """One part of the fused lazy tensor, read out of it; its codes are those of the whole."""

    def within(box: Box) -> Box:
        starts, stops = box.starts, box.stops
        if transposed:
            starts, stops = starts[::-1], stops[::-1]
        return Box((0, *starts), (1, *stops)).shifted(stored.starts)

    def read(box: Box) -> Tensor:
        part = value.read(within(box)).squeeze(0)
        return part.T if transposed else part

    def of_part(codes: FileCodes) -> FileCodes:
        return FileCodes(codes.scheme, lambda box: codes.read(within(box)))

    return LazyTensor(shape, value.dtype, read, tuple(map(of_part, value.codes)))

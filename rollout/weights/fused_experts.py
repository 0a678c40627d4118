"""Spellings: the same weights under other names, fused or renamed, seen as file-form tensors.

transformers 5 keeps the experts of a layer in two tensors, ``X.experts.gate_up_proj`` [E, 2 I, H]
(rows: gate, then up) and ``X.experts.down_proj`` [E, H, I], and writes them to files one by one:
``X.experts.{i}.gate_proj.weight`` [I, H] and so on; Mixtral's files say ``block_sparse_moe`` and
``w1 w3 w2`` where its memory says ``mlp``. Convolutions of delta nets are one tensor in memory, and
three in files (``fused_rows.py``). The file form is canonical: coverage, duplicates and
digests are judged in it, so either spelling, in a file or a stream, is the same set of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import (
    Box,
    LazyTensor,
    Shape,
    SparsePatch,
    TensorPiece,
    WeightSlot,
    WeightValue,
)
from rollout.weights.fused_boxes import FusedBoxes, from_slots, patch_of
from rollout.weights.fused_rows import FusedRows, fused_rows
from rollout.wire.spellings import near


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How files name the experts of a layer: the linears of one, and the module that has them all.

    ``memory``: what transformers 5 calls that module.
    """

    gate: str
    up: str
    down: str
    module: str = "mlp"
    memory: str = "mlp"

    @property
    def linears(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


PROJ_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")
W123_NAMES = ExpertNames("w1", "w3", "w2", module="block_sparse_moe")
# All that an architecture declares; a stream is told by them, without a word about the model.
EXPERT_NAMES = (PROJ_NAMES, W123_NAMES)
# Granite's experts, stacked in files too: what files call them -> what transformers 5 does.
_STACKED = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}
# Stacked experts that a model holds one by one, as it does where they are quantised: both linears
# of one -> whether files have them transposed, whatever their shapes.
STACKED = {("gate_up_proj", "down_proj"): True, ("input_linear", "output_linear"): False}
_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_FORGETS = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
_MEMORY = {names.module: names.memory for names in EXPERT_NAMES}


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


@dataclass(frozen=True, slots=True)
class Spellings:
    """Other names of a model's file-form tensors: ``renames`` one to one, ``fused`` in one.

    ``cut``: file-form tensors that may come cut elsewhere than they are (``FusedRows.even``).
    ``told``: slots of those that no name shows; the engine tells a sender of them.
    """

    renames: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, FusedExperts | FusedBoxes] = field(default_factory=dict)
    cut: Mapping[str, FusedRows] = field(default_factory=dict)
    told: tuple[WeightSlot, ...] = ()

    @classmethod
    def of(cls, shapes: Mapping[str, Shape], slots: Sequence[WeightSlot] = ()) -> Spellings:
        """The spellings transformers 5 uses for the file-form tensors ``shapes`` (all of them).

        Derived from whole name components and shapes alone, so that a sender and an engine that
        know the same tensors agree without a word; and from ``slots`` of whole tensors of the files
        in those of memory (``param``), of which they have to speak.
        """
        layers: dict[str, dict[str, dict[int, Shape]]] = defaultdict(lambda: defaultdict(dict))
        renames: dict[str, str] = {}
        for name, shape in shapes.items():
            parts = name.split(".")
            if is_expert(parts):
                layers[".".join(parts[:-3])][parts[-2]][int(parts[-3])] = shape
            elif (stacked := _stacked_name(name)) is not None:
                renames[stacked] = name
            elif (memory := memory_name(name)) != name and memory not in shapes:
                renames[memory] = name
                if parts[-3:-1] == ["block_sparse_moe", "gate"]:  # of Phi-MoE
                    renames[".".join((*memory.split(".")[:-2], "router", parts[-1]))] = name
            renames |= dict.fromkeys(_others(name, shapes), name)
        fused: dict[str, FusedExperts | FusedBoxes] = {
            one.name: one
            for prefix, linears in layers.items()
            for one in _fuse(prefix, linears)
            if one.name not in shapes
        }
        rows = [one for one in fused_rows(shapes) if one.name not in shapes]
        fused |= {one.name: one for one in rows}
        cut = {part: one for one in rows for part, _ in one.held}
        known = {*renames, *fused}
        others, boxed = from_slots((s for s in slots if s.param not in known), shapes)
        told = tuple(slot for slot in slots if slot.param in others or slot.param in boxed)
        return cls({**renames, **others}, {**fused, **boxed}, cut, told)

    def __bool__(self) -> bool:
        return bool(self.renames or self.fused)

    def __contains__(self, name: str) -> bool:
        return name in self.renames or name in self.fused

    def respells(self, name: str, shape: Shape) -> bool:
        """Whether a tensor of this name and shape is something else in file form."""
        return name in self or self.cut_of(name, shape) is not None

    def cut_of(self, name: str, shape: Shape) -> FusedRows | None:
        """What a tensor of this name is a part of, where its shape shows that it was cut anew."""
        rows = self.cut.get(name)
        return rows if rows is not None and rows.is_even(name, tuple(shape)) else None

    def names(self) -> list[str]:
        return [*self.renames, *self.fused]

    def split_shape(self, name: str, shape: Shape) -> list[tuple[str, Shape]]:
        """What a tensor of this name and shape is in file form."""
        if (rows := self.cut_of(name, shape)) is not None:
            return [part for part in rows.split_shape() if part[0] == name]
        if (fused := self.fused.get(name)) is None:
            return [(self.renames.get(name, name), shape)]
        fused.is_transposed(shape)
        return fused.split_shape()


class Splitter:
    """Turns one stream, value by value, into file form; remembers which layouts it has met, and
    parts that wait for others of theirs."""

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._met: dict[str, Shape] = {}
        self._waiting: dict[str, dict[str, WeightValue]] = defaultdict(dict)

    def split(self, name: str, value: WeightValue) -> Iterator[tuple[str, WeightValue]]:
        """``value`` in file form; itself when its name is. Raises ``WeightMismatch`` for a shape
        that is neither the model's nor its transpose, or could be either."""
        if (rows := self._spellings.cut_of(name, tuple(value.shape))) is not None:
            waiting = self._waiting[rows.name]
            if name in waiting:
                raise WeightMismatch(f"{name}: was sent twice")
            # A caller may reuse a tensor's memory for the next one.
            waiting[name] = value.detach().clone() if isinstance(value, Tensor) else value
            if len(waiting) == len(rows.held):
                yield from rows.joined(self._waiting.pop(rows.name))
            return
        fused = self._spellings.fused.get(name)
        if fused is None:
            yield self._spellings.renames.get(name, name), value
            return
        self.meet(fused, tuple(value.shape))
        yield from fused.split(value)

    def left(self) -> list[str]:
        """At the end of the stream: of parts that still wait, which, and for what."""
        return [
            f"{', '.join(waiting)}: cut evenly, of which nothing can be made without "
            f"{', '.join(name for name, _ in rows.held if name not in waiting)}; send all of "
            "them in one update"
            for rows in {id(rows): rows for rows in self._spellings.cut.values()}.values()
            if (waiting := self._waiting.get(rows.name))
        ]

    def meet(self, fused: FusedExperts | FusedBoxes, shape: Shape) -> None:
        """Judge the layout of a fused tensor beside its sibling's."""
        transposed = fused.is_transposed(shape)
        self._met[fused.name] = shape
        other = self._spellings.fused.get(fused.sibling)
        if other is None or other.name not in self._met:
            return
        other_transposed = other.is_transposed(self._met[other.name])
        for one, by, doubt in ((fused, other, other_transposed), (other, fused, transposed)):
            if doubt and one.ambiguous:
                raise WeightMismatch(
                    f"{one.name}: shape {one.shape} is the same transposed, and {by.name} came "
                    "transposed; send both as transformers 5 holds them, or one tensor per expert"
                )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``: first by its words, then by its numbers; or None.

    Names that differ in numbers alone are one candidate, so that thousands of experts cost little.
    """
    patterns: dict[str, list[str]] = defaultdict(list)
    for one in known:
        patterns[_words(one)].append(one)
    if (pattern := near(_words(name), patterns)) is None:
        return None
    wanted = _numbers(name)

    def distance(one: str) -> list[int]:
        return [abs(a - b) for a, b in zip(_numbers(one), wanted, strict=False)]

    return min(patterns[pattern], key=distance)


def _words(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdecimal()]


def is_expert(parts: list[str]) -> bool:
    """Whether name components read ``... experts.<number>.<linear>.weight``."""
    return (
        len(parts) >= 4
        and parts[-1] == "weight"
        and parts[-4] == "experts"
        and parts[-3].isdecimal()
        and any(parts[-2] in linears for linears in (*(n.linears for n in EXPERT_NAMES), *STACKED))
    )


def memory_name(name: str) -> str:
    """What transformers 5 calls in memory what a file calls ``name``, by its components."""
    return ".".join(_MEMORY.get(part, part) for part in name.split("."))


def _others(name: str, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """What transformers 5 has in memory: OLMo-Hybrid's norms, the gates of Kimi's states."""
    parts = name.split(".")
    if len(parts) < 3:
        return
    before, module, field = ".".join(parts[:-2]), parts[-2], parts[-1]
    if module in _NORMS:
        yield f"{before}.{_NORMS[module]}.{field}"
    attention, own = f"{before}.{module}", field
    if field == "weight":
        attention, own = before, f"{module}.{field}"
    if own in _FORGETS and f"{attention}.{_FORGETS[0]}" in shapes:
        yield f"{attention}.forget_gate.{own}"


def _stacked_name(name: str) -> str | None:
    before, module, rest = name.partition(".block_sparse_moe.")
    return f"{before}{module}{_STACKED[rest]}" if rest in _STACKED else None


def _fuse(prefix: str, linears: Mapping[str, Mapping[int, Shape]]) -> Iterable[FusedExperts]:
    """Both fused tensors of the layer ``prefix``, if its experts are numbered and shaped alike."""
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
        return LazyTensor(box.shape[1:], value.dtype, _reader(value, stored, transposed))
    if transposed:
        raise WeightMismatch(f"{name}: a patch of a transposed tensor is not supported")
    return patch_of(name, value, box, box.shape[1:])


def _reader(value: LazyTensor, stored: Box, transposed: bool) -> Callable[[Box], Tensor]:
    """Reads a box of one part out of the fused lazy tensor."""

    def read(box: Box) -> Tensor:
        starts, stops = box.starts, box.stops
        if transposed:
            starts, stops = starts[::-1], stops[::-1]
        part = value.read(Box((0, *starts), (1, *stops)).shifted(stored.starts)).squeeze(0)
        return part.T if transposed else part

    return read

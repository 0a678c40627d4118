"""Spellings: the same weights under other names, fused or renamed, seen as file-form tensors.

Experts of a layer are two tensors in memory (``fused_experts.py``), under other names
(``expert_names.py``). Convolutions of delta nets are one tensor in memory, and three in files
(``fused_rows.py``). The file form is canonical: coverage, duplicates and digests are judged in it,
so either spelling, in a file or a stream, is the same set of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import Shape, WeightSlot, WeightValue
from rollout.weights.expert_names import is_expert, memory_name, stacked_name
from rollout.weights.fused_boxes import FusedBoxes, from_slots
from rollout.weights.fused_experts import FusedExperts, fuse_experts
from rollout.weights.fused_rows import FusedRows, fused_rows

_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_FORGETS = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")


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
        return cls._of(tuple(shapes.items()), tuple(slots))

    @classmethod
    @lru_cache(maxsize=16)  # every update asks for those of the same tensors
    def _of(
        cls, tensors: tuple[tuple[str, Shape], ...], slots: tuple[WeightSlot, ...]
    ) -> Spellings:
        shapes = dict(tensors)
        layers: dict[str, dict[str, dict[int, Shape]]] = defaultdict(lambda: defaultdict(dict))
        renames: dict[str, str] = {}
        for name, shape in shapes.items():
            parts = name.split(".")
            if is_expert(parts):
                layers[".".join(parts[:-3])][parts[-2]][int(parts[-3])] = shape
            elif (stacked := stacked_name(name)) is not None:
                renames[stacked] = name
            elif (memory := memory_name(name)) != name and memory not in shapes:
                renames[memory] = name
                if parts[-3:-1] == ["block_sparse_moe", "gate"]:  # of Phi-MoE
                    renames[".".join((*memory.split(".")[:-2], "router", parts[-1]))] = name
            renames |= dict.fromkeys(_others(name, shapes), name)
        fused: dict[str, FusedExperts | FusedBoxes] = {
            one.name: one
            for prefix, linears in layers.items()
            for one in fuse_experts(prefix, linears)
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

    def modules(self) -> dict[str, str]:
        """Of weights that have another name, what names within their modules begin with, as
        ``weights.names.placed`` takes it: those of adapters are not among the renamed."""
        end = "weight"
        return {
            name.removesuffix(end): own.removesuffix(end)
            for name, own in self.renames.items()
            if name.endswith(f".{end}") and own.endswith(f".{end}")
        }

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

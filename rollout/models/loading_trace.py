"""What a loading routine does, as slots: it is run on tensors without memory, and watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.errors import WeightMismatch
from rollout.models.weight_table import ParamSpec, WeightTable
from rollout.weights import PLAIN, Box, Shape, TensorMeta, WeightSlot
from rollout.weights.fused_experts import Spellings


def trace_loading(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    tensors: Sequence[TensorMeta],
    aliases: Mapping[str, str],
) -> WeightTable:
    """The weight table of ``model`` (on meta), whose ``load`` is shown each of ``tensors`` once.

    Boxes of a tensor that are copied into boxes of a parameter become slots, boxes filled with a
    constant its padding; a tensor of which nothing is taken gets an empty slot. Raises
    ``WeightMismatch`` naming what is written by other means: such values could not be verified.
    """
    parameters = dict(model.named_parameters())
    watch = _Watch({name: parameter.data for name, parameter in parameters.items()})
    slots: dict[str, tuple[WeightSlot, ...]] = {}
    first = next(iter(parameters), "")
    with torch.no_grad():
        for meta in tensors:
            source = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            with watch.source(meta.name, source):
                load([(meta.name, source)])
            slots[meta.name] = tuple(
                WeightSlot(meta.name, meta.shape, take, param, put)
                for param, put, take in watch.taken()
            ) or (_nothing(meta, first, parameters),)
    if watch.problems:
        raise WeightMismatch(
            f"{type(model).__name__} loads by more than copying boxes, so what it holds cannot be "
            f"verified: {'; '.join(dict.fromkeys(watch.problems))}"
        )
    specs = {
        name: ParamSpec(tuple(p.shape), PLAIN, tuple(dict.fromkeys(watch.filled[name])))
        for name, p in parameters.items()
    }
    spellings = Spellings.of({meta.name: meta.shape for meta in tensors})
    return WeightTable(slots, specs, dict(aliases), spellings=spellings)


def _nothing(meta: TensorMeta, param: str, parameters: Mapping[str, Tensor]) -> WeightSlot:
    take = Box.full((0,) * len(meta.shape))
    return WeightSlot(meta.name, meta.shape, take, param, Box.full((0,) * parameters[param].dim()))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from one source into parameters; views are told by storage and strides."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_storage(p): (name, tuple(p.shape)) for name, p in parameters.items()}
        self._kept = parameters  # storages are told apart while they live
        self._name, self._tensor = "", torch.empty(0)
        self._copies: list[tuple[str, Box, Box]] = []
        self.filled: dict[str, list[Box]] = defaultdict(list)
        self.problems: list[str] = []

    def source(self, name: str, tensor: Tensor) -> _Watch:
        self._name, self._tensor, self._copies = name, tensor, []
        return self

    def taken(self) -> list[tuple[str, Box, Box]]:
        return self._copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        written = func._schema.is_mutable and target is not None
        if written and target is not None and _storage(target) in self._parameters:
            self._note(func._schema.name, target, args)
        return func(*args, **(kwargs or {}))

    def _note(self, op: str, target: Tensor, args: tuple[Any, ...]) -> None:
        param, shape = self._parameters[_storage(target)]
        put = box_of(target, shape)
        if put is None:
            self.problems.append(f"{self._name}: writes no box of {param}")
        elif op in ("aten::fill_", "aten::zero_"):
            if op == "aten::fill_" and args[1] != 0:
                self.problems.append(f"{self._name}: fills {param} with {args[1]}")
            self.filled[param].append(put)
        elif op == "aten::copy_" and _storage(args[1]) == _storage(self._tensor):
            take = box_of(args[1], tuple(self._tensor.shape))
            if take is None or args[1].numel() != target.numel():
                self.problems.append(f"{self._name}: no box of it goes to {param}")
            else:
                self._copies.append((param, put, take))
        else:
            name = op.removeprefix("aten::")
            self.problems.append(f"{self._name}: {param} is written by {name} of computed values")


def box_of(view: Tensor, shape: Shape) -> Box | None:
    """Which box of a row-major tensor of ``shape`` a view of it is, in order; else None."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    starts, left = [], view.storage_offset()
    for stride in strides[: len(shape)]:
        starts.append(left // stride)
        left %= stride
    sizes = [1] * len(shape)
    axis = 0
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        while axis < len(shape) and (strides[axis] != stride or shape[axis] == 1):
            axis += 1
        if axis == len(shape) or size > shape[axis] - starts[axis]:
            return None
        sizes[axis] = size
        axis += 1
    if 0 in sizes or not view.numel():
        return Box.full((0,) * len(shape))
    return Box(tuple(starts), tuple(a + n for a, n in zip(starts, sizes, strict=True)))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""The border at which a trainer's tensors enter: what holds no plain values is refused by name.

Behind it everything is a dense tensor of this process whose memory is all there, in the dtype that
was announced; native code reads by address and relies on that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rollout.errors import WeightMismatch, of_each, some
from rollout.kernels.native import memory_fault
from rollout.weight_sync.protocol.fit import dtype_fault, is_packed
from rollout.weight_sync.trainer.sources.base import (
    AtHandSource,
    BufferFor,
    LocalSource,
    Piece,
    PlacingSource,
    StayingSource,
    WeightSource,
    held_values,
)
from rollout.weight_sync.trainer.sources.names import wire_dtype
from rollout.weight_sync.trainer.sources.pairs import pair_of
from rollout.weights import Box, TensorMeta
from rollout.weights.adapters import AdapterSpec
from rollout.weights.components import POLICY, adapter_of
from rollout.weights.wanted import WantedWeights
from rollout.wire.frames import DTYPES

_SENDABLE = frozenset(DTYPES.values())
_LAZY: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]  # has no type
# Subclasses around a plain tensor of their own shape and dtype, by what they call it: torchao's
# float8 training has such parameters, which FSDP2 casts as it gathers them.
_AROUND = {"WeightWithDynamicFloat8CastTensor": "_tensor"}
_MOST = 12  # problems spelled out in one message


def fault(tensor: Any) -> str | None:
    """Why the values of ``tensor`` cannot be sent and what to do, or None; reads none of them."""
    tensor = _bare(tensor)
    kind: Any = type(tensor)
    if (wrong := _fault_of_kind(kind)) is not None:
        return wrong
    if hasattr(tensor, "ds_id") and not tensor.numel():
        return "is partitioned by ZeRO-3; pass the engine, or its module, on every rank"
    if getattr(tensor, "_is_flat_param", False):
        return "is what FSDP made of several tensors; pass the FSDP model itself, on every rank"
    if getattr(tensor, "_fsdp_flattened", False) and not tensor.numel():
        return (
            "lies in the flat parameter of an FSDP unit around what was passed; pass the FSDP "
            "model itself, on every rank, or wrap this part of it as a unit of its own"
        )
    if getattr(tensor, "bnb_quantized", False):  # of any dtype (``bnb_4bit_quant_storage``)
        return (
            "holds 4-bit codes of bitsandbytes and no plain values; send it dequantised "
            "(transformers' model.dequantize())"
        )
    if tensor.is_meta:
        return "is on the meta device and holds no values; load or initialise it first"
    if tensor.dtype not in _SENDABLE:
        return f"has dtype {tensor.dtype}, which is not sent; convert it to a floating-point one"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is not dense (layout {tensor.layout}); send its to_dense()"
    return memory_fault(tensor)


@cache
def _fault_of_kind(kind: type) -> str | None:
    """What is wrong with every object of a class: no tensor, or one of others, or of none."""
    if not issubclass(kind, Tensor):
        return f"is a {kind.__name__}, not a tensor; leave it out"
    if kind.__name__ == "ShardedTensor":  # which refuses to be asked anything else
        return (
            "is a ShardedTensor, whose values are spread over ranks; pass the FSDP model itself, "
            "on every rank"
        )
    if issubclass(kind, _LAZY):
        return "is not initialised yet; run a forward pass first"
    if kind.__name__ == "FakeTensor":
        return "is a FakeTensor and holds no values; make it outside of FakeTensorMode"
    if kind.__name__ == "DTensor":
        return (
            "is a DTensor, whose values are spread over ranks; pass the module or its whole "
            "state_dict(), or yield full_tensor()"
        )
    if not hasattr(kind, "__tensor_flatten__"):
        return None  # what else is no tensor of its own has no memory
    return (
        f"is a {kind.__module__}.{kind.__name__}, which holds no plain values; send it dequantised "
        "or unwrapped, as a torch.Tensor"
    )


def check_all(items: Iterable[tuple[str, Any]]) -> None:
    """Raise one ``WeightMismatch`` that names every tensor whose values cannot be sent."""
    problems = []
    for name, tensor in items:
        if (wrong := fault(local_part(tensor))) is not None:
            problems.append(f"{name} {wrong}")
    if problems:
        named = some(of_each(problems), _MOST, "; ")
        raise WeightMismatch(f"nothing was sent: {named}", problems=problems)


def readable(name: str, tensor: Any) -> Tensor:
    """``tensor`` detached, as native code may read it; else a ``WeightMismatch`` that names it."""
    if (wrong := fault(tensor)) is not None:
        raise WeightMismatch(f"{name} {wrong}", problems=[f"{name} {wrong}"])
    return plain(tensor)


def plain(tensor: Tensor) -> Tensor:
    """One that was checked, detached, as native code may read it."""
    found: Tensor = _bare(tensor).detach()
    return found.resolve_neg() if found.is_neg() else found


def _bare(tensor: Any) -> Any:
    name = _AROUND.get(type(tensor).__name__)
    return tensor if name is None else getattr(tensor, name)


def is_dtensor(obj: object) -> bool:
    """Whether ``obj`` is a DTensor; imports nothing."""
    kind: Any = type(obj)
    return _is_dtensor(kind)


@cache
def _is_dtensor(kind: type) -> bool:
    return any(
        cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")
        for cls in kind.__mro__
    )


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor, as it is held; anything else as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


class Incoming:
    """A trainer's source as everything that sends or digests it reads it: checked, cast, in pieces.

    ``wanted``: of no tensors where there is no engine. ``components``: what is sent of,
    ``adapters`` among them; ``merged``: see ``UpdateRequest``. What cannot be cast to the dtype
    that is wanted sensibly is a ``WeightMismatch`` that names the tensor and both dtypes. Values of
    other ranks than the first are not read, unless locally.
    """

    def __init__(
        self,
        inner: WeightSource,
        wanted: WantedWeights,
        components: tuple[str, ...] = (POLICY,),
        adapters: Mapping[str, AdapterSpec] | None = None,
        merged: tuple[str, ...] = (),
    ) -> None:
        self.inner, self.components, self.adapters = inner, components, dict(adapters or {})
        self.merged, self._wanted, self._dtype = merged, wanted, wanted.dtype
        self._left: Tensor | None = None  # the last that was yielded as it is
        self._at_hand: list[tuple[str, Tensor]] | None = None
        self._held: dict[str, list[tuple[Box, Tensor]] | None] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """The components that are no adapters."""
        return tuple(part for part in self.components if adapter_of(part) is None)

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        found = self.inner.metadata()
        if found is None:
            return None
        wire = [wire_dtype(meta.name, meta.dtype, self._dtype) for meta in found]
        return tuple(
            meta if meta.dtype == dtype else replace(meta, dtype=dtype)
            for meta, dtype in zip(found, wire, strict=True)
        )

    def pieces(self) -> Generator[Piece]:
        """Whole tensors, one gather after the other: in lockstep, with values on the first rank."""
        items: Any = iter(self.inner)
        # An iterator that ends early must close the inner one: it may hold gathered parameters.
        with closing(items) if hasattr(items, "close") else nullcontext():
            for item in items:
                name, tensor = pair_of(item)
                if tensor is self._left:
                    self._check_dtype(name, tensor)
                    yield Piece.whole(name, tensor)
                elif self.inner.agreement.is_sender:
                    yield Piece.whole(name, self._cast(name, readable(name, tensor)))
                else:
                    dtype = wire_dtype(name, tensor.dtype, self._dtype)
                    yield Piece.whole(name, torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def place_by(self, buffer_for: BufferFor) -> None:
        """Have the source gather into given memory, where it can (``PlacingSource``)."""
        if isinstance(self.inner, PlacingSource):
            self.inner.place_by(buffer_for)

    def leave(self, stays: Callable[[Tensor], bool]) -> None:
        """Have the source yield as they are what ``stays`` says so of, where it can
        (``StayingSource``).
        """

        def left(tensor: Tensor) -> bool:
            self._left = tensor if stays(tensor) else None
            return self._left is not None

        if isinstance(self.inner, StayingSource):
            self.inner.leave(left)

    def at_hand(self) -> list[tuple[str, Tensor]] | None:
        """All tensors as they are, where no rank has to gather any; of a model where there are GPUs
        that it may lie on: what lies on a CPU is packed. Looked at once.
        """
        if self._at_hand is not None:
            return self._at_hand
        if not isinstance(self.inner, AtHandSource):
            return None
        if self.models and not torch.cuda.is_available():
            return None
        found = self.inner.at_hand()
        if found is None:
            return None
        # The dtypes of an adapter's tensors are not told one by one.
        of_each = found if self.models else {x.dtype: (name, x) for name, x in found}.values()
        for name, tensor in of_each:
            self._check_dtype(name, tensor)
        self._at_hand = found
        return found

    @property
    def reads_locally(self) -> bool:
        """Whether each rank can read its own boxes."""
        return isinstance(self.inner, LocalSource)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return self.inner.local_boxes()

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        """Of a source that reads locally: the values of its boxes of one tensor."""
        inner: Any = self.inner
        return [
            (box, self._cast(name, readable(name, values)))
            for box, values in inner.local_values(name)
        ]

    def held_values(self, name: str) -> list[tuple[Box, Tensor]] | None:
        """The same where they lie, in their own dtype, until the update ends; None where the source
        does not say that they stay. Looked at once.
        """
        if name not in self._held:
            self._held[name] = self._look(name)
        return self._held[name]

    def _look(self, name: str) -> list[tuple[Box, Tensor]] | None:
        inner: Any = self.inner  # one that reads locally
        found = held_values(inner, name)
        if found is None:
            return None
        for _, values in found:
            self._check_dtype(name, values)
        return [(box, readable(name, values)) for box, values in found]

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        self._check_dtype(name, tensor)
        return tensor.to(wire_dtype(name, tensor.dtype, self._dtype))

    def _check_dtype(self, name: str, tensor: Tensor) -> None:
        want = self._wanted.get(name)
        if want is not None and want.dtype == tensor.dtype:
            return
        if want is not None and is_packed(tensor.dtype, tuple(tensor.shape), want, self._wanted):
            return
        if (wrong := dtype_fault(tensor.dtype, self._dtype if want is None else want.dtype)) and (
            want is not None or tensor.dtype.is_floating_point
        ):
            raise WeightMismatch(f"{name} {wrong}", problems=[f"{name} {wrong}"])

"""A source whose adapters are merged on the way out, one weight after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.errors import SourceFailed
from rollout.weight_sync.merge_plan import MergePlan
from rollout.weight_sync.names import wire_dtype
from rollout.weights import Box, TensorMeta

T = TypeVar("T")


class MergedSource:
    """Adds to each weight that ``inner`` yields what its adapters add; on the sender alone.

    ``inner`` gathers in the tensors' own dtypes, so that a merge has the bits of PEFT's own; the
    cast to the wire's follows it. The trainer's tensors are never written to. Peak extra memory
    beside ``inner``'s: on the sender, the weights whose factors have not come yet (one; FSDP1:
    those of a unit) and one product of factors, in their own dtype. Raises ``SourceFailed`` where
    a weight or a factor does not come.
    """

    def __init__(self, inner: Any, plan: MergePlan, dtype: torch.dtype) -> None:
        self.inner, self.agreement = inner, inner.agreement
        self._plan, self._dtype = plan, dtype

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        metadata: tuple[TensorMeta, ...] | None = self.inner.metadata()
        if metadata is None:
            return None
        items = ((meta.name, meta) for meta in metadata)
        return tuple(
            TensorMeta(name, wire_dtype(meta.dtype, self._dtype), meta.shape)
            for name, meta, _ in self._complete(items, lambda meta: meta)
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        sending = self.agreement.is_sender
        items = iter(self.inner)
        # An iterator that ends early must close the inner one: it may hold gathered parameters.
        with closing(items) if hasattr(items, "close") else nullcontext():
            # What is held outlives the next item, and is added to: a copy of the trainer's.
            keep = Tensor.clone if sending else lambda tensor: tensor
            for name, tensor, factors in self._complete(items, keep):
                if factors and sending:
                    for addition in self._plan.additions[name]:
                        addition.add_to(tensor, factors)
                yield name, tensor.to(wire_dtype(tensor.dtype, self._dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        """No box of a merged weight is held by any rank before it is merged."""
        return [
            (name, [] if name in self._plan.additions else boxes)
            for name, boxes in self.inner.local_boxes()
            if name not in self._plan.owners
        ]

    def _complete(
        self, items: Iterable[tuple[str, T]], keep: Callable[[T], T]
    ) -> Iterator[tuple[str, T, dict[str, T]]]:
        """Each weight with the factors of what is added to it, as soon as all of them have come."""
        held: dict[str, T] = {}
        found: dict[str, T] = {}
        for name, value in items:
            target = self._plan.owners.get(name, name)
            if target not in self._plan.additions:
                yield name, value, {}
                continue
            (held if name == target else found)[name] = keep(value)
            names = self._plan.factors_of(target)
            if target in held and all(factor in found for factor in names):
                yield target, held.pop(target), {factor: found.pop(factor) for factor in names}
        if held or found:
            raise SourceFailed(
                f"{', '.join([*held, *found][:4])} came without the tensors to merge with; is a "
                "weight that an adapter changes shared with another module?"
            )

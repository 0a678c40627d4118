"""Whole tensors in this process: a module, DDP, ZeRO-1/2, or a dict; nothing to gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from rollout.errors import SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.names import bind, named_weights, wire_dtype
from rollout.weights import Box, TensorMeta


class PlainSource:
    """A module's parameters and persistent buffers, or a dict's tensors, cast one by one.

    Where several ranks hold the same weights (DDP), the sender's are sent and the others yield
    meta tensors; no rank waits for another inside ``__iter__``.
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        aliases: Mapping[str, str],
        dtype: torch.dtype,
        agreement: Agreement,
    ) -> None:
        self.agreement = agreement
        self._dtype = dtype
        items = named_weights(weights) if isinstance(weights, nn.Module) else list(weights.items())
        for name, tensor in items:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise SourceFailed(
                    f"{name!r} is a {type(tensor).__name__}; a source maps names to tensors"
                )
        self._bound = bind(items, aliases)
        if not self._bound:
            raise SourceFailed(f"{type(weights).__name__} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(
            TensorMeta(name, wire_dtype(t.dtype, self._dtype), tuple(t.shape))
            for name, t in self._bound.items()
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = None if self.agreement.is_sender else "meta"
        for name, tensor in self._bound.items():
            yield name, tensor.detach().to(device, wire_dtype(tensor.dtype, self._dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, [Box.full(tuple(t.shape))]) for name, t in self._bound.items()]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor = self._bound[name].detach()
        value = tensor.to(wire_dtype(tensor.dtype, self._dtype))
        return [(Box.full(tuple(tensor.shape)), value)]

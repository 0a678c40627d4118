"""Whole tensors in this process: a module, DDP, ZeRO-1/2, a dict or a list; nothing to gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import BoundSource, BufferFor
from rollout.weight_sync.trainer.sources.names import Naming, Pairs, held_by
from rollout.weight_sync.trainer.sources.values import check_all, plain, readable
from rollout.weights import Box


class PlainSource(BoundSource):
    """A module's parameters and persistent buffers, or a dict's or list's tensors, cast singly.

    Where several ranks hold the same weights (DDP), the sender's are sent and the others yield
    meta tensors; no rank waits for another inside ``__iter__``.
    """

    def __init__(
        self,
        weights: nn.Module | Pairs,
        naming: Naming,
        agreement: RankGroup,
        items: list[tuple[str, Tensor]] | None = None,
    ) -> None:
        """``items``: what ``weights`` hold, where the caller has looked."""
        items = held_by(weights, naming.wants) if items is None else items
        check_all(items)
        super().__init__(weights, items, naming, agreement)
        self._place: BufferFor = lambda dtype, shape: None
        self._stays: Callable[[Tensor], bool] = lambda tensor: False

    def place_by(self, buffer_for: BufferFor) -> None:
        self._place = buffer_for

    def leave(self, stays: Callable[[Tensor], bool]) -> None:
        self._stays = stays

    def at_hand(self) -> list[tuple[str, Tensor]]:
        return [(name, plain(tensor)) for name, tensor in self._bound.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._bound.items():
            dtype = self._naming.dtype_of(name, tensor.dtype)
            if not self.agreement.is_sender:
                yield name, torch.empty(tensor.shape, dtype=dtype, device="meta")
            elif self._stays(held := readable(name, tensor)):
                yield name, held
            elif dtype == tensor.dtype or (cast := self._place(dtype, tuple(tensor.shape))) is None:
                yield name, held.to(dtype)
            else:
                yield name, cast.copy_(held)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, self._held(tensor)) for name, tensor in self._bound.items()]

    def held_values(self, name: str) -> list[tuple[Box, Tensor]]:
        held = readable(name, self._bound[name])
        return [(box, held) for box in self._held(self._bound[name])]

    def _held(self, tensor: Tensor) -> list[Box]:
        """What this rank sends; between DDP's forwards buffers are not kept alike."""
        alike = isinstance(tensor, nn.Parameter)
        return [Box.full(tuple(tensor.shape))] if self._sends(alike) else []

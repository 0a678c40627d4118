"""What a source of weights is, and what it may offer beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weights import Box, Shape, TensorMeta

Room = Callable[[torch.dtype, Shape], Tensor | None]


@runtime_checkable
class WeightSource(Protocol):
    """A complete set of weights that can be streamed, possibly by several ranks together."""

    agreement: Agreement

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        """What ``__iter__`` will yield (file-form names, wire dtypes, full shapes), or None.

        Local: no rank waits for another. None where the source does not know before it runs.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """``(file name, full tensor in the wire dtype)``, in model order.

        Collective: every rank of the source iterates in lockstep, and closes its iterator when the
        update ends early. A tensor is valid until the next one is asked for. On ranks other than
        the sender it may be a meta tensor: right shape and dtype, no values, no memory. Peak extra
        memory is bounded by the largest tensor (FSDP1: by its largest unit), not by the model.
        """
        ...

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        """Which boxes of each tensor this rank holds without any gather; local, for resharding."""
        ...


@runtime_checkable
class LocalSource(WeightSource, Protocol):
    """A source that can also read what this rank holds, so that no gather is needed at all."""

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        """The values of each of ``local_boxes()[name]``, in the wire dtype, shaped like the box.

        Local; valid until the next call. Ranks that hold the same box hold the same values. A
        source that cannot tell its boxes of some tensor lists none, and is gathered instead.
        """
        ...


@runtime_checkable
class PlacingSource(WeightSource, Protocol):
    """A source that can gather a tensor right to where it will be sent from."""

    def place_by(self, room: Room) -> None:
        """On the sender, before it iterates: ``room`` gives memory for the one tensor to come.

        Host memory, uninitialised, of that dtype and shape; None where the source has to find its
        own. It may block while what was sent before is still on its way, and never raises.
        """
        ...

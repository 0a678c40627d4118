"""What a source of weights is, and what it may offer beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rollout.errors import SourceFailed, some
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weights import Box, Shape, TensorMeta

BufferFor = Callable[[torch.dtype, Shape], Tensor | None]
HeldOf = Callable[[str], list[tuple[Box, Tensor]] | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, as one rank sends it; ``values``, shaped like it, until the next piece.

    A rank that has nothing to send of a tensor yields it whole on the meta device, so that all
    ranks count alike. ``last``: no more of this tensor comes from this rank.
    """

    name: str
    shape: Shape  # of the whole tensor
    box: Box
    values: Tensor
    last: bool = True

    @classmethod
    def whole(cls, name: str, values: Tensor) -> Piece:
        shape = tuple(values.shape)
        return cls(name, shape, Box.full(shape), values)


@runtime_checkable
class WeightSource(Protocol):
    """A complete set of weights that can be streamed, possibly by several ranks together.

    Of the policy; one whose tensors are other components', too, as ``mtp:mtp.fc.weight`` is, has an
    attribute ``components`` that names all, on every rank alike. What a release's files call
    ``mtp.fc.weight`` goes where it does from a dict.
    """

    agreement: RankGroup

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
class HeldSource(LocalSource, Protocol):
    """A source of which the engine's ranks may read what this rank holds, where it lies."""

    def held_values(self, name: str) -> list[tuple[Box, Tensor]] | None:
        """What ``local_values`` casts: the tensors themselves, in their own dtype, which stay where
        and as they are until the update ends. None where it has no such thing.
        """
        ...


@runtime_checkable
class PlacingSource(WeightSource, Protocol):
    """A source that can gather a tensor right to where it will be sent from."""

    def place_by(self, buffer_for: BufferFor) -> None:
        """On the sender, before it iterates: ``buffer_for`` gives memory for the tensor to come.

        Host memory, uninitialised, of that dtype and shape; None where the source has to find its
        own. It may block while what was sent before is still on its way, and never raises.
        """
        ...


@runtime_checkable
class StayingSource(WeightSource, Protocol):
    """A source whose tensors stay where they are until its owner changes them."""

    def leave(self, stays: Callable[[Tensor], bool]) -> None:
        """On the sender, before it iterates: a tensor of which ``stays`` says so will be read where
        it lies until the update ends, and is yielded as it is, in its own dtype.
        """
        ...


@runtime_checkable
class AtHandSource(WeightSource, Protocol):
    """A source that can hand out all of its tensors at once, which stay as those of a
    ``StayingSource`` do.
    """

    def at_hand(self) -> list[tuple[str, Tensor]] | None:
        """On the sender, all that ``__iter__`` would yield if everything stayed; None where some
        of it has to be gathered.
        """
        ...


def held_values(source: LocalSource, name: str) -> list[tuple[Box, Tensor]] | None:
    """Those of a ``HeldSource``; None of any other."""
    # Asked of every tensor: ``isinstance`` looks at all that the protocol has.
    held: HeldOf | None = getattr(source, "held_values", None)
    return None if held is None else held(name)


def none_is_taken(what: str, names: Sequence[str]) -> SourceFailed:
    """``names``: of the tensors of a source, ``what``, none of which has to be sent."""
    return SourceFailed(
        f"of {what} nothing can be sent{_on_rank()}: the engine passes over {some(names)}; a "
        "release's head goes to an engine that drafts by it (draft_component='mtp'), or, as "
        "{'mtp': tensors}, to one that holds it"
    )


class BoundSource:
    """What the sources of modules share: tensors under the names that the engine knows."""

    def __init__(
        self,
        weights: object,
        items: Iterable[tuple[str, Tensor]],
        naming: Naming,
        agreement: RankGroup,
    ) -> None:
        self.agreement, self._naming = agreement, naming
        held = list(items)
        self._bound = naming.bind(held)
        if not self._bound:
            kind = type(weights).__name__
            if held:
                raise none_is_taken(kind, [name for name, _ in held])
            raise SourceFailed(f"{kind} holds no tensor; nothing can be sent{_on_rank()}")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(
            TensorMeta(name, self._naming.dtype_of(name, tensor.dtype), self._shape(tensor))
            for name, tensor in self._bound.items()
        )

    def _shape(self, tensor: Tensor) -> Shape:
        return tuple(tensor.shape)

    def held_values(self, name: str) -> list[tuple[Box, Tensor]]:
        """The values of this rank's boxes of a tensor, as they lie in its memory."""
        raise NotImplementedError

    def at_hand(self) -> list[tuple[str, Tensor]] | None:
        """Of a trainer of one rank, which holds everything."""
        if self.agreement.size > 1:
            return None
        found = []
        for name, tensor in self._bound.items():
            held = self.held_values(name)
            if [box for box, _ in held] != [Box.full(self._shape(tensor))]:
                return None
            found.append((name, held[0][1]))
        return found

    @torch.no_grad()
    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        dtype = self._naming.dtype_of(name, self._bound[name].dtype)
        return [(box, values.to(dtype)) for box, values in self.held_values(name)]

    def _sends(self, alike: bool) -> bool:
        """Whether this rank sends what it holds of a tensor: of one that nothing keeps ``alike`` on
        all ranks, as buffers, the first rank's is sent.
        """
        return alike or self.agreement.is_sender


def _on_rank() -> str:
    """Where this is one of a trainer's ranks that may have nothing to send."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        return ""
    return (
        f" (from trainer rank {dist.get_rank()} of {dist.get_world_size()}; where rank 0 alone "
        "holds the weights, call update_weights there alone)"
    )

"""The seam between a trainer and an engine: one update's lease, whatever lies between them.

``engine.updates.lease.Lease`` implements it in process, the gRPC client over one stream. An update
is a lease held by an open channel; closing the channel before the commit aborts it, unless it was
sealed with a ``fence``: then it is PREPARED and waits for a ``Decision``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import UpdateReceipt


class WeightChannel(Protocol):
    """One update's lease. Calls come from one thread, in the order of the state machine.

    Every method raises the error of the side that failed, and leaves the update aborted.
    ``reads_in_place``: the engine is in this process, so a payload may be the source's own tensor,
    read where it lies. ``secret``: what further streams of this update have to present; "" if it
    accepts none.
    """

    reads_in_place: bool

    @property
    def secret(self) -> str: ...

    def begin(self, request: UpdateRequest) -> Begun:
        """Take the lease; waits up to ``request.timeout`` for another update to end."""
        ...

    def buffer(self, nbytes: int) -> Tensor | None:
        """Memory, uint8 [nbytes], from which a payload goes without a copy; None: any will do."""
        ...

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        """Announce the next bucket to every rank, in order; returns without waiting for them.

        ``payload``: uint8 [nbytes] where the channel itself carries the bytes, else None.
        """
        ...

    def wait(self, index: int, timeout: float) -> None:
        """Wait until every rank has taken bucket ``index``, so that its buffer may be reused.

        Before any bucket is announced, ``wait(0)`` returns once every rank has connected.
        """
        ...

    def seal(self, seal: Seal) -> None:
        """Judge completeness and digests on every rank; returns when all have voted yes."""
        ...

    def commit(self) -> UpdateReceipt:
        """Make the staged version live on every rank at one step boundary."""
        ...

    def abort(self, reason: str) -> None:
        """Give up the update; the old version keeps serving. Never raises.

        Before ``begin``: the sender's own checks refused it; this counts as a failed update.
        """
        ...

    def close(self) -> None:
        """End the lease; an update that has not committed is aborted. Idempotent."""
        ...


@runtime_checkable
class InPlaceChannel(Protocol):
    """A channel to a rank that may read tensors of this process where they lie on a device."""

    @property
    def reads_on(self) -> str:
        """The device of the only rank, where it runs in this process; else ""."""
        ...

    def in_place(self, header: BucketHeader, regions: Sequence[Tensor]) -> None:
        """Announce a bucket whose entries lie in ``regions``, uint8 and flat, on that device.

        All work of the device on them is done; they do not change until ``wait`` returns.
        """
        ...


@runtime_checkable
class ChannelInTurn(Protocol):
    """A channel whose update may take memory only once it holds the lease."""

    def begin_in_turn(
        self, request: UpdateRequest, in_turn: Callable[[UpdateRequest], UpdateRequest] | None
    ) -> Begun:
        """``begin``; what is accepted, and held, becomes what ``in_turn`` makes of it."""
        ...

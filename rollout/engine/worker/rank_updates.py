"""One rank's side of an update: receive buckets, load them into the shadow, vote.

The worker calls ``begin``, ``connect``, ``bucket``, ``seal`` and ``abort`` on its staging thread,
in the order in which the engine announced them; steps go on meanwhile on its main thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollout.engine.worker.staged_load import StagedLoad
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import (
    ConfigError,
    IncompleteUpdate,
    RolloutError,
    TransferFailed,
    from_wire,
    to_wire,
)
from rollout.models.adapters.slots import AdapterSlots
from rollout.weight_sync.protocol.bucket import unpack
from rollout.weight_sync.protocol.digests import slot_rows
from rollout.weight_sync.protocol.header_reader import HeaderReader
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader, UpdateRequest
from rollout.weight_sync.transports import find
from rollout.weight_sync.transports.base import EngineRank, InPlaceReceiver, Receiver
from rollout.weight_sync.transports.foreign import make_member
from rollout.weight_sync.transports.foreign_group import Member
from rollout.weights import Box, TensorPiece, WeightSlot
from rollout.weights.adapters import AdapterSpec
from rollout.weights.box import disjoint
from rollout.wire.codec import from_plain, to_plain


class RankUpdates:
    """At most one update at a time on this rank; a failed call leaves none."""

    def __init__(
        self,
        instances: ModelInstances,
        rank: int,
        device: str,
        *,
        check_finite: bool = True,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._instances, self._rank, self._device = instances, rank, device
        self._adapters = adapters
        self._check_finite = check_finite
        self._update: _Staging | None = None
        self._failed: tuple[str, Mapping[str, Any]] | None = None  # an update, and why it ended
        self._members: dict[str, Member] = {}  # of frameworks' groups, across their updates
        self._using = ""  # the one that the next broadcasts come over
        self._headers = HeaderReader()
        self._entries: dict[int, tuple[BucketEntry, ...]] = {}  # read in place last, by bucket

    def join(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Take this rank's place in a framework's group; blocks until it has formed.

        ``args["id"]`` is what ``use``, ``member`` and ``leave`` will name it by.
        """
        member = make_member(args["group"], self._rank, self._device)
        self._members[args["id"]] = member
        try:
            member.join(args["timeout"])
        except BaseException:
            self.leave(args["id"])
            raise
        return {}

    def use(self, member_id: str) -> dict[str, Any]:
        """The broadcasts of the buckets that follow come over the group of this name."""
        self._using = member_id
        return {}

    def member(self, member_id: str) -> dict[str, Any]:
        """Whether this rank is in the group that ``join`` called ``member_id``, and that lives."""
        member = self._members.get(member_id)
        return {"alive": member is not None and member.is_alive()}

    def drop(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Receive a broadcast of ``args["nbytes"]`` that is of no update."""
        member = self._members.get(self._using)
        if member is None:
            raise TransferFailed(f"rank {self._rank} has left the trainer's group")
        member.receive(args["nbytes"], args["timeout"])
        return {}

    def leave(self, member_id: str | None = None) -> dict[str, Any]:
        """Leave this group, or all, from any thread; a blocked ``join`` or ``bucket`` raises.

        One that has been left already is left alone.
        """
        for one in [*self._members] if member_id is None else [member_id]:
            member = self._members.pop(one, None)
            if member is not None:
                member.close()
        return {}

    def foresee(self) -> dict[str, Any]:
        """What an update would take here, by its staging; begins none."""
        return dict(self._instances.foresee())

    def begin(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Open the shadow for the update described by ``args["request"]``, and ``args["slots"]``
        for its adapters.
        """
        self._drop()
        request = UpdateRequest.read(args["request"])
        before = self._instances.device_bytes
        with self._dropping_on_error():  # there may be no memory for it
            transport = find(request.transport, self._device)
            here = EngineRank(self._rank, self._device, lambda: self._members.get(self._using))
            receiver = transport.receiver(request, here)
            load = StagedLoad(
                self._instances, self._adapters, request, args.get("slots", {}), self._rank
            )
        self._update = _Staging(request, load, receiver, before)
        if transport.senders == "all":
            return {"wants": to_plain(_wants(load))}
        return {}

    def connect(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Meet the sender; blocks until it has come too, or the deadline."""
        update = self._current(args)
        with self._dropping_on_error():
            update.receiver.connect(update.request.timeout)
        return {}

    def bucket(self, args: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Receive the announced bucket and load it; buckets come in order, none is skipped."""
        update = self._current(args)
        header = args["header"]
        if isinstance(header, BucketHeader):
            header = self._known(header)
        else:
            header = self._headers.read(header.encode())
        header = header.share(self._rank)
        with self._dropping_on_error():
            if header.index != update.next_index:
                raise TransferFailed(
                    f"rank {self._rank}: bucket {header.index} came where "
                    f"{update.next_index} was due"
                )
            update.take(header, tensors)
            update.next_index += 1
        return {"index": header.index}

    def seal(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Judge completeness, derive, digest what is now in memory: this rank's vote."""
        update = self._current(args)
        with self._dropping_on_error():
            if update.next_index != args["num_buckets"]:
                raise IncompleteUpdate(
                    f"rank {self._rank}: {update.next_index} of {args['num_buckets']} buckets "
                    "arrived before the seal"
                )
            load = update.load
            num_bytes = load.finish()
            started = time.perf_counter()
            bad: list[tuple[WeightSlot, int]] | None = [] if self._check_finite else None
            rows = slot_rows(load.digest_slots(bad))
            held = slot_rows(load.live_digests())
            scalings = load.scalings()
            verify = time.perf_counter() - started
            extra = max(0, self._instances.device_bytes - update.before) + update.largest
            load.keep()
        update.receiver.close()
        self._update = None
        return {
            "digests": rows,
            "quantized": held,
            "scalings": scalings,
            "scheme": self._instances.scheme if update.request.models else "",
            "nonfinite": slot_rows(bad or ()),
            "num_bytes": num_bytes,
            "stage_seconds": update.seconds,
            "verify_seconds": verify,
            "extra_bytes": extra,
        }

    def read_adapter(self, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What this rank holds of the adapter in ``args["slot"]``, box by box; the caller sees to
        it that nothing is staged there.
        """
        if self._adapters is None:
            raise ConfigError("this rank holds no adapters: start it with max_adapters=")
        model = self._adapters.view(int(args["slot"]), from_plain(AdapterSpec, args["spec"]))
        found = [slot for slots in model.table.slots.values() for slot in slots]
        boxes = [[s.source, list(s.take.starts), list(s.take.stops)] for s in found]
        values = (model.read_slot(slot).contiguous().cpu().clone() for slot in found)
        return {"boxes": boxes}, {str(index): value for index, value in enumerate(values)}

    def abort(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Forget the update ``args["update_id"]`` if it is this rank's current one."""
        if self._update is not None and self._update.request.update_id == args["update_id"]:
            self._drop()
        return {}

    def restore(self) -> dict[str, Any]:
        """After an aborted update without staging: the live weights as they were before it."""
        self._drop()
        self._instances.restore_live()
        return {}

    def interrupt(self, update_id: str) -> None:
        """From any thread: free a staging thread that is blocked receiving for this update."""
        update = self._update
        if update is not None and update.request.update_id == update_id:
            update.receiver.close()

    def _known(self, header: BucketHeader) -> BucketHeader:
        """With the entries of the last update's bucket of this index, where they are the same, as
        the reader of texts has them.
        """
        if not header.is_in_place:
            return header
        last = self._entries.get(header.index)
        if last is not None and last == header.entries:
            return replace(header, entries=last)
        self._entries[header.index] = header.entries
        return header

    def _current(self, args: Mapping[str, Any]) -> _Staging:
        update = self._update
        if update is None or update.request.update_id != args["update_id"]:
            if self._failed is not None and self._failed[0] == args["update_id"]:
                raise from_wire(self._failed[1])  # what follows from it may be asked for first
            raise TransferFailed(
                f"rank {self._rank}: update {args['update_id']} is not in progress here"
            )
        return update

    def _drop(self, error: BaseException | None = None) -> None:
        update, self._update = self._update, None
        if update is not None:
            # Its wire form: the error itself would keep the update's memory by its traceback.
            self._failed = None if error is None else (update.request.update_id, to_wire(error))
            update.receiver.close()

    def _dropping_on_error(self) -> _DropOnError:
        return _DropOnError(self)


class _Staging:
    """One update being staged on this rank."""

    def __init__(
        self, request: UpdateRequest, load: StagedLoad, receiver: Receiver, before: int
    ) -> None:
        self.request, self.load, self.receiver = request, load, receiver
        self.before = before  # bytes that the instances took on the device
        self.largest = 0  # bytes of a bucket that were received
        self.next_index = 0
        self.seconds = 0.0

    def take(self, header: BucketHeader, carried: Mapping[str, Tensor]) -> None:
        """Load what an announced bucket holds, once it has been received or where the sender has
        it.
        """
        receiver, request = self.receiver, self.request
        if header.is_in_place:
            if not isinstance(receiver, InPlaceReceiver):
                raise TransferFailed(
                    f"{request.transport} carries buckets, and reads nothing in place"
                )
            regions = receiver.regions(header, carried)
            started = time.perf_counter()
            self.load.feed_in_place(header, regions)
        else:
            payload = receiver.receive(header, carried.get("payload"), request.timeout)
            self.largest = max(self.largest, header.nbytes)
            sparse, limit = request.encoding == "delta", request.bucket_bytes
            started = time.perf_counter()
            self.load.feed(unpack(header, payload, sparse=sparse, inflate=limit))
        self.seconds += time.perf_counter() - started


def _wants(load: StagedLoad) -> dict[str, tuple[Box, ...]]:
    """The boxes that trainer ranks have to send here, by tensor.

    A tensor of which this rank takes nothing is never sent to it: it is complete as it is.
    """
    boxes: dict[str, list[Box]] = {}
    nothing: dict[str, TensorPiece] = {}
    for slot in load.slots():
        boxes.setdefault(slot.source, []).append(slot.take)
        empty = Box((0,) * len(slot.shape), (0,) * len(slot.shape))
        nothing[slot.source] = TensorPiece(
            slot.shape, torch.float32, empty, torch.empty(empty.shape)
        )
    wants = {name: disjoint(takes) for name, takes in boxes.items()}
    load.feed((name, nothing[name]) for name, found in wants.items() if not found)
    return {name: found for name, found in wants.items() if found}


class _DropOnError:
    """A rank that sees an error drops its group at once, which frees the others."""

    def __init__(self, updates: RankUpdates) -> None:
        self._updates = updates

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        told = error
        if not isinstance(error, RolloutError) and isinstance(error, RuntimeError | MemoryError):
            told = TransferFailed(f"rank {self._updates._rank}: {error}")
        self._updates._drop(told)
        if told is not error:
            raise told from error

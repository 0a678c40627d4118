"""An update whose bytes come to one member of a fleet, for its host's members and for others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollout.errors import RolloutError, TransferFailed
from rollout.server.grpc.relay import Forwarder, Relay, Relays
from rollout.weight_sync.protocol.channel import ChannelInTurn, WeightChannel
from rollout.weight_sync.protocol.link import Forward, StreamOffer
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.shared_memory import IpcSender


class SharingChannel:
    """``WeightChannel``: buckets arrive right in shared memory, of which ``Begun.shared`` tells.

    This engine's ranks read them there, as ranks of other engines of this host may, which whoever
    began the update tells of each bucket once this engine's have taken it. A bucket's half is free
    again once all of them have: who sends sees to that. Where the request ``relays``, buckets may
    be announced without bytes, which a feed brings (``Begun.feed``), and go on to another host.
    """

    reads_in_place = False
    secret = ""

    def __init__(self, channel: WeightChannel, relays: Relays) -> None:
        self._channel, self._relays = channel, relays
        self._sender: IpcSender | None = None
        self._relay: Relay | None = None
        self._update_id = ""
        self._next = 0  # bucket

    def begin(self, request: UpdateRequest) -> Begun:
        """With bytes on the channel to this engine alone where there is no memory to share."""
        stream, own = StreamOffer.of(request), replace(request, offer={})
        self._update_id = request.update_id
        if stream.shares and isinstance(self._channel, ChannelInTurn):
            begun = self._channel.begin_in_turn(own, self._in_memory)
        else:
            begun = self._channel.begin(own)
        if self._sender is not None:
            begun = replace(begun, shared=dict(self._sender.offer))
        if not stream.relays:
            return begun
        self._relay = Relay(self._memory, self._announce, request.bucket_bytes)
        self._relays.add(request.update_id, self._relay)
        return replace(begun, feed=self._relay.secret)

    def forward(self, wanted: Forward) -> str:
        """Have what comes go on to another host; why it cannot, "" where it does."""
        if self._relay is None:
            return "this update's bytes go no further"
        try:
            self._relay.forward(Forwarder(wanted, self._relays.shown))
        except RolloutError as error:
            return str(error)
        return ""

    def buffer(self, nbytes: int) -> Tensor | None:
        if self._relay is not None:
            return self._relay.start(self._next, nbytes)
        return self._channel.buffer(nbytes) if self._sender is None else self._half(nbytes)

    def arrived(self, have: int) -> None:
        """So many bytes of the next bucket lie in the ``buffer`` for it."""
        if self._relay is not None:
            self._relay.arrived(self._next, have)

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        if payload is not None:
            self._announce(header, payload)
        elif self._relay is not None:
            self._relay.expect(header)
        else:
            raise TransferFailed(f"bucket {header.index} came without the bytes to share")

    def brought(self, index: int, timeout: float) -> tuple[str, int]:
        """As ``Relay.brought``."""
        return ("", index) if self._relay is None else self._relay.brought(index, timeout)

    def wait(self, index: int, timeout: float) -> None:
        self._channel.wait(index, timeout)

    def seal(self, seal: Seal) -> None:
        self._end_relay()
        if self._sender is not None:
            self._sender.forget()  # everybody who reads has it mapped
        self._channel.seal(seal)

    def commit(self) -> UpdateReceipt:
        return self._channel.commit()

    def abort(self, reason: str) -> None:
        self._end_relay()
        self._channel.abort(reason)

    def close(self) -> None:
        self._end_relay()
        self._channel.close()
        if self._sender is not None:
            self._sender.close()

    # ---- helpers ----

    def _in_memory(self, request: UpdateRequest) -> UpdateRequest:
        """Made for the one update that holds the lease: many may wait, or be refused."""
        try:
            self._sender = IpcSender.of_packed(request)
        except TransferFailed:
            return request
        return replace(request, transport="ipc", offer=self._sender.offer)

    def _announce(self, header: BucketHeader, payload: Tensor) -> None:
        """A bucket to this engine; of a relay by one thread at a time."""
        self._next = header.index + 1
        if self._sender is None:
            self._channel.bucket(header, payload)
            return
        self._sender.put(header, payload)
        self._channel.bucket(header, None)

    def _half(self, nbytes: int) -> Tensor | None:
        if self._sender is None or not self._sender.buffers:
            return None
        half = self._sender.buffers[self._next % 2]
        return half[:nbytes] if nbytes <= half.numel() else None

    def _memory(self, index: int, nbytes: int) -> Tensor:
        """For bucket ``index``, where a relay may read it while the next one comes."""
        sender = self._sender
        if sender is None or not sender.buffers:
            return torch.empty(nbytes, dtype=torch.uint8)
        half = sender.buffers[index % 2]
        if nbytes > half.numel():
            raise TransferFailed(f"bucket {index} of {nbytes} bytes is longer than the shared half")
        return half[:nbytes]

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relays.remove(self._update_id, self._relay)

"""An update whose bytes come to one member of a fleet, for all members of its host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateReceipt,
    UpdateRequest,
    WeightChannel,
)
from rollout.weight_sync.transports.shared_memory import IpcSender


class SharingChannel:
    """``WeightChannel``: buckets arrive right in shared memory, of which ``Begun.shared`` tells.

    This engine's ranks read them there, as ranks of other engines of this host may, which whoever
    began the update tells of each bucket once this engine's have taken it. A bucket's half is free
    again once all of them have: who sends sees to that.
    """

    reads_in_place = False
    secret = ""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._sender: IpcSender | None = None
        self._next = 0  # bucket

    def begin(self, request: UpdateRequest) -> Begun:
        """With bytes on the channel to this engine alone where there is no memory to share."""
        try:
            sender = IpcSender.of_packed(request)
        except TransferFailed:
            return self._channel.begin(replace(request, offer={}))
        self._sender = sender
        shared: dict[str, Any] = dict(sender.offer)
        begun = self._channel.begin(replace(request, transport="ipc", offer=shared))
        return replace(begun, shared=shared)

    def room(self, nbytes: int) -> Tensor | None:
        if self._sender is None:
            return self._channel.room(nbytes)
        half = self._sender.buffers[self._next % 2]
        return half[:nbytes] if nbytes <= half.numel() else None

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        self._next = header.index + 1
        if self._sender is None:
            self._channel.bucket(header, payload)
            return
        if payload is None:
            raise TransferFailed(f"bucket {header.index} came without the bytes to share")
        self._sender.put(header, payload)
        self._channel.bucket(header, None)

    def wait(self, index: int, timeout: float) -> None:
        self._channel.wait(index, timeout)

    def seal(self, seal: Seal) -> None:
        self._forget()
        self._channel.seal(seal)

    def commit(self) -> UpdateReceipt:
        return self._channel.commit()

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
        if self._sender is not None:
            self._sender.close()

    def _forget(self) -> None:
        """Everybody who reads has it mapped."""
        if self._sender is not None:
            self._sender.forget()

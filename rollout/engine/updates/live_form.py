"""An engine's memory as an update: codes and scales go to an equal engine as they are held."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing

import torch
from torch import Tensor

from rollout.engine.executors import gather_replies
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.read_lease import ReadLease
from rollout.errors import ConfigError, VersionConflict
from rollout.kernels import digest
from rollout.loader.peft_adapter import PeftAdapter
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import (
    BucketEntry,
    BucketHeader,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weights import Box
from rollout.weights.components import POLICY, adapter_component, qualified
from rollout.wire.frames import flat_bytes

PIECE = 8 << 20  # bytes of a parameter that go at once
BUCKET = 4 * PIECE

Item = tuple[str, torch.dtype, tuple[int, ...], Box, Tensor]  # the last: its bytes, uint8


def check_equal(here: WeightInfo, there: WeightInfo) -> None:
    """``ConfigError`` where one engine cannot take the other's memory."""
    for what in ("grid", "tensor_parallel_size", "pipeline_parallel_size", "dtype"):
        own, other = getattr(here, what), getattr(there, what)
        if own != other:
            raise ConfigError(
                f"quantised engines of one fleet are equal: their {what} is {own} and {other}"
            )


def send_live_form(
    coordinator: Coordinator,
    lease: ReadLease,
    channel: WeightChannel,
    adapters: Mapping[str, PeftAdapter],
    *,
    version: int,
    adapters_after: Mapping[str, int] | None,
    timeout: float,
) -> UpdateReceipt:
    """Have an equal engine go live with what is live here, as ``version``; for the holder of
    ``lease``. Its ranks' digests, of what codes were made from, have to be the ones here.
    """
    components = (POLICY, *map(adapter_component, adapters))
    request = UpdateRequest(
        update_id=uuid.uuid4().hex, version=version, encoding="live", bucket_bytes=BUCKET,
        components=components, adapters={name: a.spec for name, a in adapters.items()},
        adapters_after=adapters_after, merged=coordinator.merged, label=coordinator.info().label,
        timeout=timeout,
    )  # fmt: skip
    digests = dict(coordinator.digests(timeout))
    with closing(channel):
        channel.begin(request)
        count = wire_bytes = 0
        items = _items(coordinator, adapters, digests, timeout)
        for entries, payload in _buckets(lease.pieces(items)):
            header = BucketHeader(count, entries, payload.numel())
            channel.bucket(header, payload)
            channel.wait(count, timeout)
            count, wire_bytes = count + 1, wire_bytes + payload.numel()
        channel.seal(Seal(num_buckets=count, digests=digests, wire_bytes=wire_bytes))
        return channel.commit()


def _items(
    coordinator: Coordinator,
    adapters: Mapping[str, PeftAdapter],
    digests: dict[str, int],
    timeout: float,
) -> Iterator[Item]:
    """All ranks' memory, then the adapters' tensors, whose digests are added."""
    sizes = gather_replies(coordinator.engine.call("stage_raw_sizes", {}), "read", timeout)
    for rank, (reply, _) in enumerate(sizes):
        for name, nbytes in reply["sizes"]:
            for start in range(0, nbytes, PIECE):
                box = Box((start,), (min(start + PIECE, nbytes),))
                piece = _read(coordinator, rank, name, box, timeout)
                yield name, torch.uint8, (nbytes,), box, piece
    for adapter, found in adapters.items():
        for name, tensor in found.tensors.items():
            full = Box.full(tuple(tensor.shape))
            name = qualified(adapter_component(adapter), name)
            digests[name] = digest(tensor, full.shape, full)
            yield name, tensor.dtype, full.shape, full, flat_bytes(tensor)


def _read(coordinator: Coordinator, rank: int, name: str, box: Box, timeout: float) -> Tensor:
    args = {"rank": rank, "name": name, "start": box.starts[0], "stop": box.stops[0]}
    replies = gather_replies(coordinator.engine.call("stage_read_raw", args), "read", timeout)
    reply, values = replies[rank]
    if reply["version"] != coordinator.engine.base_version:
        raise VersionConflict("the weights changed while they were read")
    return values["0"]


def _buckets(items: Iterator[Item]) -> Iterator[tuple[tuple[BucketEntry, ...], Tensor]]:
    """Of at most ``BUCKET`` bytes, but for one tensor that is larger by itself."""
    entries: list[BucketEntry] = []
    parts: list[Tensor] = []
    end = 0
    for name, dtype, shape, box, raw in items:
        if entries and end + raw.numel() > BUCKET:
            yield tuple(entries), _joined(entries, parts)
            entries, parts, end = [], [], 0
        entries.append(BucketEntry(name, dtype, shape, box, end, raw.numel()))
        parts.append(raw)
        end = -(-(end + raw.numel()) // ALIGNMENT) * ALIGNMENT
    if entries:
        yield tuple(entries), _joined(entries, parts)


def _joined(entries: list[BucketEntry], parts: list[Tensor]) -> Tensor:
    payload = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
    for entry, part in zip(entries, parts, strict=True):
        payload[entry.offset : entry.offset + entry.nbytes] = part
    return payload

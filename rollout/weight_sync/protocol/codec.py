"""Plain, JSON-able forms of the nouns of an update, for gRPC and for the workers' pipes.

``X_from_wire`` checks types and bounds before it builds anything and raises ``TransferFailed``
naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollout.distributed import Rendezvous
from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketEntry,
    BucketHeader,
    Message,
    RankReceipt,
    Seal,
    UpdateReceipt,
    UpdateRequest,
    Wants,
    WeightInfo,
)
from rollout.weights import Box, TensorMeta
from rollout.wire.checked import (
    MAX_LIST,
    Fields,
    int_of,
    ints_of,
    list_of,
    row_of,
    seconds_of,
    string_of,
)
from rollout.wire.frames import dtype_from_name, dtype_name
from rollout.wire.version import PROTOCOL, protocol_problem

Wire = dict[str, Any]
T = TypeVar("T")

MAX_DIGEST = (1 << 64) - 1
MAX_OFFER = 1 << 16


def parsed(data: bytes) -> Any:
    """The JSON document of a message; raises ``TransferFailed`` where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"malformed update message: {error}") from error


def meta_to_wire(meta: TensorMeta) -> list[Any]:
    return [meta.name, dtype_name(meta.dtype), list(meta.shape)]


def meta_from_wire(wire: Any) -> TensorMeta:
    name, dtype, shape = row_of(wire, 3, "tensor")
    return TensorMeta(
        string_of(name, "name"),
        dtype_from_name(string_of(dtype, "dtype")),
        ints_of(shape),
    )


def rendezvous_to_wire(where: Rendezvous) -> Wire:
    return {
        "host": where.host,
        "port": where.port,
        "secret": where.secret,
        "size": where.size,
        "backend": where.backend,
    }


def rendezvous_from_wire(wire: Any) -> Rendezvous:
    get = Fields(wire, "rendezvous")
    return Rendezvous(
        host=get.string("host"),
        port=get.int("port", 1, 65535),
        secret=get.string("secret"),
        size=get.int("size", 1, 1 << 20),
        backend=get.string("backend"),
    )


def header_to_wire(header: BucketHeader) -> Wire:
    wire: Wire = {
        "index": header.index,
        "nbytes": header.nbytes,
        "entries": [_entry_to_wire(e) for e in header.entries],
    }
    if header.messages:
        wire["messages"] = [
            [m.src, m.dst, m.start, m.stop, [_entry_to_wire(e) for e in m.entries]]
            for m in header.messages
        ]
    return wire


def header_from_wire(wire: Any) -> BucketHeader:
    """Types and signs are checked here; ``bucket.unpack`` checks that entries fit the payload."""
    get = Fields(wire, "bucket header")
    entries = get.list("entries", _entry)
    messages = get.list("messages", _message) if "messages" in wire else ()
    return BucketHeader(get.int("index"), entries, get.int("nbytes"), messages)


def _message(row: Any) -> Message:
    src, dst, start, stop, entries = row_of(row, 5, "message")
    return Message(
        int_of(src, "sending rank"),
        int_of(dst, "receiving rank"),
        int_of(start, "start"),
        int_of(stop, "stop"),
        list_of(entries, _entry, "entries of a message"),
    )


def _entry_to_wire(e: BucketEntry) -> list[Any]:
    return [
        e.name,
        dtype_name(e.dtype),
        list(e.shape),
        list(e.box.starts),
        list(e.box.stops),
        e.offset,
        e.nbytes,
        *([e.sparse, e.count] if e.sparse else []),
        *([e.inflated] if e.inflated else []),
    ]


def _entry(row: Any) -> BucketEntry:
    length = len(row) if isinstance(row, list | tuple) and len(row) in (9, 10) else 7
    fields = row_of(row, length, "bucket entry")
    name, dtype, shape, starts, stops, offset, nbytes, *coding = fields
    name = string_of(name, "name")
    return BucketEntry(
        name,
        dtype_from_name(string_of(dtype, "dtype")),
        ints_of(shape),
        _box(starts, stops, f"bucket entry {name!r:.200}"),
        int_of(offset, "offset"),
        int_of(nbytes, "nbytes"),
        int_of(coding[0], "bytes of a gap", 1, 8) if coding else 0,
        int_of(coding[1], "count") if coding else 0,
        int_of(coding[2], "length before compression") if coding[2:] else 0,
    )


def _box(starts: Any, stops: Any, what: str) -> Box:
    try:
        return Box(ints_of(starts), ints_of(stops))
    except ValueError as error:
        raise TransferFailed(f"{what}: {error}") from error


def boxes_to_wire(boxes: Mapping[str, Sequence[Box]]) -> Wire:
    """Tensor name -> its boxes, of one rank."""
    return {name: [[list(b.starts), list(b.stops)] for b in of] for name, of in boxes.items()}


def boxes_from_wire(wire: Any) -> dict[str, tuple[Box, ...]]:
    """Types and signs alone are checked: whoever plans with them knows the shapes."""
    if not isinstance(wire, Mapping) or len(wire) > MAX_LIST:
        raise TransferFailed("boxes: expected an object of bounded size")

    def box(row: Any) -> Box:
        starts, stops = row_of(row, 2, "box")
        return _box(starts, stops, "box")

    return {string_of(name, "name"): list_of(rows, box, "boxes") for name, rows in wire.items()}


def wants_to_wire(wants: Wants) -> list[Any]:
    return [boxes_to_wire(rank) for rank in wants]


def wants_from_wire(wire: Any) -> Wants:
    return list_of(wire, boxes_from_wire, "wants")


def request_to_wire(request: UpdateRequest) -> Wire:
    return {
        "update_id": request.update_id,
        "protocol": PROTOCOL,
        "version": request.version,
        "base": None if request.base is None else list(request.base),
        "encoding": request.encoding,
        "metadata": _optional(request.metadata, lambda m: [meta_to_wire(x) for x in m]),
        "partial": request.partial,
        "transport": request.transport,
        "offer": dict(request.offer),
        "bucket_bytes": request.bucket_bytes,
        "staging": request.staging,
        "in_flight": request.in_flight,
        "label": request.label,
        "timeout": request.timeout,
    }


def request_from_wire(wire: Any) -> UpdateRequest:
    get = Fields(wire, "update request")
    update_id = get.string("update_id")
    if problem := protocol_problem(get.int("protocol"), "the sender of the update"):
        raise ConfigError(problem)
    return UpdateRequest(
        update_id=update_id,
        version=get.optional("version", lambda v: int_of(v, "version")),
        base=get.optional("base", _base),
        encoding=get.string("encoding"),
        metadata=get.optional("metadata", lambda v: list_of(v, meta_from_wire, "metadata")),
        partial=get.flag("partial"),
        transport=get.string("transport"),
        offer=_offer(get.mapping("offer")),
        bucket_bytes=get.int("bucket_bytes", 1),
        staging=get.string("staging"),
        in_flight=get.string("in_flight"),
        label=get.optional("label", lambda v: string_of(v, "label")),
        timeout=get.seconds("timeout"),
    )


def _offer(offer: Wire) -> Wire:
    if len(json.dumps(offer)) > MAX_OFFER:
        raise TransferFailed(f"update request: its offer has more than {MAX_OFFER} bytes")
    return offer


def _base(value: Any) -> tuple[int, int]:
    epoch, version = row_of(value, 2, "base")
    return int_of(epoch, "base epoch", 0, MAX_DIGEST), int_of(version, "base version")


def begun_to_wire(begun: Begun) -> Wire:
    return {
        "update_id": begun.update_id,
        "epoch": begun.epoch,
        "base_version": begun.base_version,
        "version": begun.version,
        "layout": begun.layout,
        "wants": _optional(begun.wants, wants_to_wire),
    }


def begun_from_wire(wire: Any) -> Begun:
    get = Fields(wire, "begun")
    return Begun(
        update_id=get.string("update_id"),
        epoch=get.int("epoch", 0, MAX_DIGEST),
        base_version=get.int("base_version"),
        version=get.int("version"),
        layout=get.string("layout"),
        wants=get.optional("wants", wants_from_wire),
    )


def info_to_wire(info: WeightInfo) -> Wire:
    return {
        "epoch": info.epoch,
        "version": info.version,
        "label": info.label,
        "state": info.state,
        "dtype": dtype_name(info.dtype),
        "tensors": [meta_to_wire(meta) for meta in info.tensors],
        "aliases": dict(info.aliases),
        "tensor_parallel_size": info.tensor_parallel_size,
        "device": info.device,
        "transports": list(info.transports),
        "last_update_id": info.last_update_id,
        "host": info.host,
        "undo": info.undo,
        "memory": dict(info.memory),
        "zstd": info.zstd,
        "devices": list(info.devices),
    }


def info_from_wire(wire: Any) -> WeightInfo:
    get = Fields(wire, "weight info")
    return WeightInfo(
        epoch=get.int("epoch", 0, MAX_DIGEST),
        version=get.int("version"),
        label=get.optional("label", lambda v: string_of(v, "label")),
        state=get.string("state"),
        dtype=dtype_from_name(get.string("dtype")),
        tensors=get.list("tensors", meta_from_wire),
        aliases=get.strings("aliases"),
        tensor_parallel_size=get.int("tensor_parallel_size", 1),
        device=get.string("device"),
        transports=get.list("transports", lambda v: string_of(v, "transport")),
        last_update_id=get.string("last_update_id"),
        host=get.string("host"),
        undo=get.string("undo"),
        memory=get.counts("memory"),
        zstd=get.flag("zstd"),
        devices=get.list("devices", lambda v: string_of(v, "device")),
    )


def seal_to_wire(seal: Seal) -> Wire:
    return {
        "num_buckets": seal.num_buckets,
        "digests": dict(seal.digests),
        "gather_seconds": seal.gather_seconds,
        "transfer_seconds": seal.transfer_seconds,
        "wire_bytes": seal.wire_bytes,
        "details": dict(seal.details),
    }


def seal_from_wire(wire: Any) -> Seal:
    get = Fields(wire, "seal")
    digests = get.mapping("digests")
    return Seal(
        num_buckets=get.int("num_buckets"),
        digests={
            string_of(name, "name"): int_of(value, f"digest of {name!r:.80}", 0, MAX_DIGEST)
            for name, value in digests.items()
        },
        gather_seconds=get.seconds("gather_seconds"),
        transfer_seconds=get.seconds("transfer_seconds"),
        wire_bytes=get.int("wire_bytes"),
        details=get.strings("details"),
    )


def receipt_to_wire(receipt: UpdateReceipt) -> Wire:
    return {
        "version": receipt.version,
        "epoch": receipt.epoch,
        "digest": receipt.digest,
        "num_tensors": receipt.num_tensors,
        "num_bytes": receipt.num_bytes,
        "wire_bytes": receipt.wire_bytes,
        "timings": dict(receipt.timings),
        "ranks": [[r.rank, r.version, r.digest, r.num_bytes] for r in receipt.ranks],
        "update_id": receipt.update_id,
        "transport": receipt.transport,
        "label": receipt.label,
        "details": dict(receipt.details),
    }


def receipt_from_wire(wire: Any) -> UpdateReceipt:
    get = Fields(wire, "update receipt")
    timings = get.mapping("timings")
    return UpdateReceipt(
        version=get.int("version"),
        epoch=get.int("epoch", 0, MAX_DIGEST),
        digest=get.int("digest", 0, MAX_DIGEST),
        num_tensors=get.int("num_tensors"),
        num_bytes=get.int("num_bytes"),
        wire_bytes=get.int("wire_bytes"),
        timings={
            string_of(k, "timing"): seconds_of(v, f"timing {k!r:.80}") for k, v in timings.items()
        },
        ranks=get.list("ranks", _rank_receipt),
        update_id=get.string("update_id"),
        transport=get.string("transport"),
        label=get.optional("label", lambda v: string_of(v, "label")),
        details=get.mapping("details"),
    )


def _rank_receipt(row: Any) -> RankReceipt:
    rank, version, digest, num_bytes = row_of(row, 4, "rank receipt")
    return RankReceipt(
        int_of(rank, "rank"),
        int_of(version, "version"),
        int_of(digest, "digest", 0, MAX_DIGEST),
        int_of(num_bytes, "num_bytes"),
    )


def _optional(value: T | None, form: Callable[[T], Any]) -> Any:
    return None if value is None else form(value)

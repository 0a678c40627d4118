"""``UpdateCommand`` messages as they travel; those of weights without copies of their bytes.

protobuf would copy a chunk into its message, and the message into the wire's bytes, and back. A
``Chunk`` has the same encoding, written and read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.rpc import rollout_pb2 as pb
from rollout.wire.codec import to_json

UPDATE = f"/{pb.DESCRIPTOR.services_by_name['WeightSync'].full_name}/Update"
_TAG = bytes([pb.UpdateCommand.CHUNK_FIELD_NUMBER << 3 | 2])  # of a field that has a length
_MAX_VARINT = 10  # bytes
_PACKET = 9 << 10  # bytes: a packet has fewer, where frames are jumbo, too


@dataclass(frozen=True, slots=True)
class Chunk:
    """Stands for ``pb.UpdateCommand(chunk=...)``; ``chunk`` is any run of bytes, not copied."""

    chunk: bytes | memoryview

    def WhichOneof(self, group: str) -> str:  # noqa: N802 - protobuf's name
        return "chunk"

    def HasField(self, name: str) -> bool:  # noqa: N802 - protobuf's name
        return name == "chunk"

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return b"".join((_TAG, _varint(len(self.chunk)), self.chunk))


def document(noun: Any, write: Callable[[Any], bytes] = to_json) -> Any:
    """A noun of updates as a message; ``write``: its JSON."""
    return pb.WeightDocument(json=write(noun))


def padded(noun: Any) -> Any:
    """As ``document``, as long as the longest packets of a lease's path: to a member that gets the
    short ones alone (a smaller MTU on the way, of which nobody is told) no call would come through.
    """
    return pb.WeightDocument(json=to_json(noun).ljust(_PACKET))


def command_to_wire(command: Any) -> bytes:
    data: bytes = command.SerializeToString()
    return data


def command_from_wire(data: bytes) -> Any:
    """An ``UpdateCommand``, or a ``Chunk`` that is a view of ``data`` where it is nothing else."""
    if data[:1] == _TAG:
        length = shift = 0
        for at in range(1, min(len(data), 1 + _MAX_VARINT)):
            length |= (data[at] & 0x7F) << shift
            shift += 7
            if data[at] < 0x80:
                if at + 1 + length == len(data):
                    return Chunk(memoryview(data)[at + 1 :])
                break
    return pb.UpdateCommand.FromString(data)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)

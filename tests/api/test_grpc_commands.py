"""A chunk of weights has protobuf's own encoding, though protobuf neither writes nor reads it."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import Chunk, command_from_wire, command_to_wire


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 16384, 2 << 20])
def test_a_chunk_is_written_and_read_as_protobuf_does(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    wire = pb.UpdateCommand(chunk=data).SerializeToString()
    assert command_to_wire(Chunk(memoryview(data))) == wire
    found = command_from_wire(wire)
    assert found.WhichOneof("kind") == "chunk"
    assert isinstance(found, Chunk)
    assert found.HasField("chunk")
    assert not found.HasField("resume")
    assert bytes(found.chunk) == data


def test_what_is_not_a_chunk_alone_is_left_to_protobuf() -> None:
    wait = pb.UpdateCommand(wait=pb.Wait(index=3, timeout=1.5))
    assert command_from_wire(command_to_wire(wait)) == wait
    both = pb.UpdateCommand(chunk=b"abc").SerializeToString() + wait.SerializeToString()
    assert command_from_wire(both) == wait  # the last of a oneof counts
    assert command_from_wire(b"").WhichOneof("kind") is None


@pytest.mark.parametrize(
    "data", [b"\x1a", b"\x1a\x05abc", b"\x1a" + b"\xff" * 12, b"\x1a\x80", b"\xff\xff"]
)
def test_a_broken_message_is_protobufs_to_refuse(data: bytes) -> None:
    with pytest.raises(DecodeError):
        command_from_wire(data)

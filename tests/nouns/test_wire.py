"""Frames: what was sent arrives; what is malformed is refused before memory is touched."""

import json
import socket
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import TransferFailed
from rollout.wire import frames


def through_a_socket(header, tensors):
    left, right = socket.socketpair()
    with left, right:
        frames.send_frame(left, header, tensors)
        left.shutdown(socket.SHUT_WR)
        frame = frames.recv_frame(right)
        assert frames.recv_frame(right) is None
    return frame


@pytest.mark.parametrize("name", list(frames.DTYPES))
def test_tensors_of_every_dtype_arrive_bit_for_bit(name: str) -> None:
    raw = torch.randint(0, 256, (3, 24), dtype=torch.uint8)
    tensor = raw.bool() if name == "bool" else raw.view(frames.DTYPES[name])
    header, tensors = through_a_socket({"a": 1}, {"x": tensor, "empty": tensor[:0]})
    assert header == {"a": 1}
    assert tensors["x"].dtype == tensor.dtype
    assert tensors["x"].shape == tensor.shape
    assert torch.equal(tensors["x"].view(torch.uint8), tensor.view(torch.uint8))
    assert tensors["empty"].shape == (0, *tensor.shape[1:])


def test_one_element_of_a_column_arrives() -> None:
    """It counts as contiguous, and its stride is not 1."""
    table = torch.arange(8.0).view(2, 4)
    _, got = through_a_socket({}, {"x": table[:1, 2], "y": table[1:, 3].unsqueeze(0)})
    assert got["x"].tolist() == [2]
    assert got["y"].tolist() == [[7]]
    assert frames.flat_bytes(table[:1, 2]).data_ptr() == table[:1, 2].data_ptr()
    assert frames.flat_bytes(table.T).numel() == frames.flat_bytes(torch.tensor(1.0)).numel() * 8


def test_an_unaligned_tensor_still_arrives() -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "x": torch.arange(4.0)}
    _, got = through_a_socket({}, tensors)
    assert torch.equal(got["x"], tensors["x"])


@pytest.mark.parametrize(
    "row",
    [
        ["float32", [4], 0, 15],
        ["float32", [4], 8, 16],
        ["float32", [-4], 0, 16],
        ["float32", [4], -4, 16],
        ["pickle", [4], 0, 16],
        ["float32", [4]],
        "x",
    ],
)
def test_a_description_that_does_not_fit_the_payload_is_refused(row) -> None:
    head = json.dumps({"tensors": {"x": row}}).encode()
    with pytest.raises(TransferFailed):
        frames.decode(head, bytearray(16))


@given(st.binary(max_size=200))
def test_random_bytes_never_crash_the_reader(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        right.settimeout(5)
        try:
            frame = frames.recv_frame(right)
        except TransferFailed:
            return
        assert frame is None or isinstance(frame[0], dict)


def test_an_announced_length_beyond_the_limit_is_refused_unread() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack("<IQ", frames.MAX_HEADER + 1, 0))
        with pytest.raises(TransferFailed, match="over the limit"):
            frames.recv_frame(right)

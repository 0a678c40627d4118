"""A 64-bit digest of tensor values that adds up over any partition into boxes.

Wire format. For an element at flat row-major position ``p`` of the full tensor, whose raw bits,
zero-extended to 64, are ``b``, and with all arithmetic modulo 2^64 and logical shifts:

    z = (p + 1) * 0x9E3779B97F4A7C15 + b
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    mix(p, b) = z ^ (z >> 31)

which is step ``p + 1`` of splitmix64 (Steele, Lea, Flood 2014) with the state moved by ``b``. The
digest of a box is the sum of ``mix`` over its elements. The mixing comes before the sum: a sum of
plain products would not see two sign flips that cancel. The dtype is not part of it, nor is any
key: it finds faults, it does not keep out forgers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.kernels.op import op
from rollout.weights import Box, Shape

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 20  # elements whose int64 temporaries are alive at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@op
def digest(values: Tensor, shape: Shape, box: Box) -> int:
    """The digest, in [0, 2^64), of the elements of ``box`` of a tensor of full ``shape``.

    values: ``box.shape``, any strides, of a dtype of 1, 2, 4 or 8 bytes. An empty box gives 0.
    """
    assert tuple(values.shape) == box.shape, f"values {values.shape} do not fill {box}"
    assert box.fits(shape)
    assert values.dtype.itemsize in _INTEGERS
    bits = values.detach().view(_INTEGERS[values.dtype.itemsize])
    total = 0
    for part, at in _pieces(bits, box):
        total += int(_mix(part, _positions(shape, at, bits.device)).sum())
    return total % 2**64


def _pieces(values: Tensor, box: Box) -> Iterator[tuple[Tensor, Box]]:
    """Halve the longest side until a piece is small."""
    if box.numel == 0:
        return
    if box.numel <= _CHUNK:
        yield values, box
        return
    dim = box.shape.index(max(box.shape))
    half = box.shape[dim] // 2
    middle = box.starts[dim] + half
    stops = (*box.stops[:dim], middle, *box.stops[dim + 1 :])
    starts = (*box.starts[:dim], middle, *box.starts[dim + 1 :])
    yield from _pieces(values.narrow(dim, 0, half), Box(box.starts, stops))
    rest = values.narrow(dim, half, box.shape[dim] - half)
    yield from _pieces(rest, Box(starts, box.stops))


def _positions(shape: Shape, box: Box, device: torch.device) -> Tensor:
    """Flat row-major index in the full tensor of each element of ``box``; int64, box.shape."""
    flat = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, stop in zip(shape, box.starts, box.stops, strict=True):
        flat = flat[..., None] * size + torch.arange(start, stop, device=device)
    return flat


def _mix(values: Tensor, positions: Tensor) -> Tensor:
    """``mix`` of the wire format; int64 wraps, as it must."""
    bits = values.long()
    if values.dtype in (torch.int16, torch.int32):
        bits = bits & ((1 << 8 * values.dtype.itemsize) - 1)  # undo the sign extension
    z = (positions + 1) * _signed(_STEP) + bits
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << 64 - by) - 1)


def _signed(constant: int) -> int:
    return constant - 2**64

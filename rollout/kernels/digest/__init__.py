"""A 64-bit digest of tensor values that adds up over any partition into boxes.

Wire format. For an element at flat row-major position ``p`` of the full tensor, whose raw bits,
zero-extended to 64, are ``b``, and with all arithmetic modulo 2^64 and logical shifts:

    x = (p + 1) * 0x9E3779B97F4A7C15 + b
    y = fold(x),  mix(p, b) = fold(y),  where fold(x) = (x mod 2^32) * (x >> 32) + x

The first line is the Weyl sequence of splitmix64 (Steele, Lea, Flood 2014), moved by ``b``; a fold
is one 32 x 32 -> 64 product, as in the middle-square generators of Widynski (2017). Every CPU and
GPU has a vector instruction for it, while a 64-bit product, as in splitmix64, takes three. The
digest of a box is the sum of ``mix`` over its elements. The mixing comes before the sum, and twice:
a sum of plain products would not see two sign flips that cancel; one fold misses one pair of equal
and opposite changes in 2^32; with two, none is found among the 2^39 that the tests look at. The
dtype is not part of it, nor is any key: it finds faults, it does not keep out forgers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.kernels.op import op
from rollout.weights import INTEGERS, Box, Shape

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as int64, which wraps
_LOW = (1 << 32) - 1
_CHUNK = 1 << 20  # elements whose int64 temporaries are alive at once


#: the bits that NaN and infinity have all of, by dtype
EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}


@op
def digest(values: Tensor, shape: Shape, box: Box, nonfinite: list[int] | None = None) -> int:
    """The digest, in [0, 2^64), of the elements of ``box`` of a tensor of full ``shape``.

    values: ``box.shape``, any strides, of a dtype of 1, 2, 4 or 8 bytes. An empty box gives 0.
    ``nonfinite``: where given, its one number grows by how many elements are NaN or infinite, which
    the same pass sees; dtypes without an entry in ``EXPONENTS`` have none.
    """
    assert tuple(values.shape) == box.shape, f"values {values.shape} do not fill {box}"
    assert box.fits(shape)
    assert values.dtype.itemsize in INTEGERS
    bits = values.detach().view(INTEGERS[values.dtype.itemsize])
    exponent = EXPONENTS.get(values.dtype)
    total = 0
    for part, at in _pieces(bits, box):
        if nonfinite is not None and exponent is not None:
            nonfinite[0] += int(((part.long() & exponent) == exponent).sum())
        total += int(mix(part, _positions(shape, at, bits.device)).sum())
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


def mix(values: Tensor, positions: Tensor) -> Tensor:
    """``mix`` of the wire format; int64 wraps, as it must."""
    bits = values.long()
    if values.dtype in (torch.int16, torch.int32):
        bits = bits & ((1 << 8 * values.dtype.itemsize) - 1)  # undo the sign extension
    return _fold(_fold((positions + 1) * _STEP + bits))


def _fold(x: Tensor) -> Tensor:
    return (x & _LOW) * ((x >> 32) & _LOW) + x

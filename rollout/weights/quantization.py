"""Schemes in which linear weights are held in fewer bits: codes, and a scale for each cell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rollout.weights.box import Box, Shape

_TINY = torch.finfo(torch.float32).tiny  # the scale of a cell of zeros
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of four bits: sign, then one of these
_BIAS = 127  # of an exponent in eight bits
_NAN = 255  # the exponent that stands for none
_PIECE = 1 << 22  # elements that are quantised at once: four float32 copies of them are alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight ``[N, K]`` becomes codes and scales.

    ``rows`` x ``columns``: a cell, whose elements share a scale; 0 columns: the whole row. Scales
    are kept for each row, [N, cells of a row]: float32, or (``codes`` "e2m1") the exponent of a
    power of two in a byte. ``largest``: the value of the largest code. ``per_byte``: codes in one.
    """

    name: str
    rows: int
    columns: int
    largest: float
    codes: str  # int8 | e4m3 | e2m1

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.int8 if self.codes == "int8" else torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.codes == "e2m1" else torch.float32

    @property
    def per_byte(self) -> int:
        return 2 if self.codes == "e2m1" else 1

    def cell(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a cell of a weight ``[N, K]``."""
        return self.rows, self.columns or max(1, shape[1])

    def cells(self, shape: Shape) -> int:
        """Cells beside one another in a row of a weight ``[N, K]``."""
        return -(-shape[1] // self.cell(shape)[1]) if shape[1] else 0

    def cover(self, shape: Shape, box: Box) -> Box:
        """The whole cells that ``box`` of a weight of ``shape`` touches."""
        cell = self.cell(shape)
        if not box.numel:
            return box
        starts = tuple(a // c * c for a, c in zip(box.starts, cell, strict=True))
        stops = tuple(
            min(-(-z // c) * c, n) for z, c, n in zip(box.stops, cell, shape, strict=True)
        )
        return Box(starts, stops)

    def fault(self, shape: Shape, take: Box) -> str | None:
        """Why a rank cannot hold ``take`` of a weight ``[N, K]`` of ``shape``, or None."""
        if self.columns and self.cover(shape, take) != take:
            return f"a rank's part {take.starts} to {take.stops} of {shape} cuts its blocks"
        if self.per_byte > 1 and shape[1] % self.columns:
            return f"{shape[1]} inputs are no multiple of {self.columns}"
        return None

    def quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Floats [n, k] of whole cells -> codes [n, k / per_byte] and scales [n, cells].

        The same for any cut into whole cells. A cell that holds NaN or infinity has a scale that
        is neither finite.
        """
        n, k = values.shape
        codes = torch.empty(n, k // self.per_byte, dtype=self.storage_dtype, device=values.device)
        scales = torch.empty(n, self.cells((n, k)), dtype=self.scale_dtype, device=values.device)
        step = max(1, _PIECE // max(1, k) // self.rows) * self.rows
        for at in range(0, n, step):
            part = slice(at, at + step)
            codes[part], scales[part] = self._quantized(values[part].float())
        return codes, scales

    def dequantize(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse, [.., n, k] in ``dtype``; each value is rounded once."""
        values = self.values(codes)
        columns = self.columns or values.shape[-1]
        if self.codes == "e2m1":
            powers = scales.int() - _BIAS
            factors = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
            factors = factors.masked_fill(scales == _NAN, float("nan"))
        else:
            factors = scales
        wide = factors.repeat_interleave(columns, dim=-1)[..., : values.shape[-1]]
        return values.mul_(wide).to(dtype)

    def nonfinite(self, codes: Tensor, scales: Tensor) -> int:
        """How many codes and scales stand for no finite number."""
        bad = scales == _NAN if self.codes == "e2m1" else ~scales.isfinite()
        none = (codes & 127) == 127 if self.codes == "e4m3" else bad.new_zeros(())
        return int(bad.sum()) + int(none.sum())

    def values(self, codes: Tensor) -> Tensor:
        """What the codes stand for, before their scales: float32, of their own memory."""
        if self.codes == "int8":
            return codes.float()
        if self.codes == "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        return _levels(codes.device)[
            torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
        ]

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (n, k), (rows, columns) = x.shape, self.cell(x.shape)
        padded = x
        down, right = -n % rows if n > rows else 0, -k % columns
        if down or right:
            padded = torch.nn.functional.pad(x, (0, right, 0, down))
        high = min(rows, len(padded))
        cells = padded.view(-1, high, padded.shape[1] // columns, columns)
        largest = cells.abs().amax(dim=(1, 3))  # [n / rows, cells]
        if self.codes == "e2m1":
            stored, scale = _powers(largest)
        else:
            # Not by a number: a GPU would multiply by its inverse, and scales differ from a CPU's.
            stored = scale = (largest / largest.new_full((), self.largest)).clamp_min(_TINY)
        scaled = (cells / scale[:, None, :, None]).view(padded.shape)[:n, :k]
        return self._codes(scaled), stored.repeat_interleave(high, dim=0)[:n]

    def _codes(self, scaled: Tensor) -> Tensor:
        if self.codes == "int8":
            return scaled.round().clamp_(-127, 127).nan_to_num_().to(torch.int8)
        if self.codes == "e4m3":
            return (
                scaled.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)
            )
        # Between two levels the even code wins, as rounding of floats has it.
        middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=scaled.device)
        size = scaled.abs()
        low = torch.bucketize(size, middles)  # at a middle: the lower code
        high = torch.bucketize(size, middles, right=True)
        codes = torch.where(low % 2 == 0, low, high) | (torch.signbit(scaled).long() << 3)
        codes = codes.to(torch.uint8).view(len(codes), -1, 2)
        return codes[..., 0] | (codes[..., 1] << 4)


@cache
def _levels(device: torch.device) -> Tensor:
    """By their four bits; kept, since a step that is captured copies nothing from the host."""
    return torch.tensor((*_LEVELS, *(-v for v in _LEVELS)), device=device)


def _powers(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents in a byte and the powers of two themselves, so that 4 is the top power of a cell.

    (OCP Microscaling Formats, section 6.3.)
    """
    bad = ~largest.isfinite()
    exponent = torch.frexp(largest.masked_fill(bad, 1)).exponent - 1 - 2
    exponent = exponent.masked_fill(largest == 0, -_BIAS).clamp(-_BIAS, _BIAS)
    stored = (exponent + _BIAS).masked_fill(bad, _NAN).to(torch.uint8)
    return stored, torch.ldexp(torch.ones_like(largest), exponent)


MXFP4 = Scheme(name="mxfp4", rows=1, columns=32, largest=6.0, codes="e2m1")
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="int8", rows=1, columns=0, largest=127.0, codes="int8"),
        Scheme(name="fp8", rows=1, columns=0, largest=448.0, codes="e4m3"),
        Scheme(name="fp8_block", rows=128, columns=128, largest=448.0, codes="e4m3"),
        MXFP4,
    )
}

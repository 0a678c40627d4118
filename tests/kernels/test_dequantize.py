"""Codes become the bfloat16 that they stand for: all of them, in any shape, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernels.backends import backends

from rollout.kernels import dequantize, quantized_linear
from rollout.kernels.dequantize import cpu
from rollout.weights import Box, TileLayout
from rollout.weights.quantization import SCHEMES, Scheme


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("shape", [(3, 256), (130, 160), (2, 5, 96), (0, 64)], ids=str)
def test_every_code_gives_the_bits_of_the_reference(set_threads, name, shape) -> None:
    scheme, generator = SCHEMES[name], torch.Generator().manual_seed(0)
    *lead, columns = shape
    codes = torch.randint(0, 256, (*lead, columns // scheme.per_byte), generator=generator)
    codes = codes.to(torch.uint8).view(scheme.storage_dtype)
    if len(codes):
        flat = codes.view(-1)
        flat[:256] = torch.arange(256).to(torch.uint8).view(codes.dtype)[: len(flat)]
    cells = (*lead, scheme.cells((1, columns)))
    scales = torch.rand(cells, generator=generator) * 0.01
    if scheme.codes == "e2m1":
        scales = torch.randint(100, 140, cells, generator=generator).to(torch.uint8)
    for threads in (1, 2):
        set_threads(threads)
        for by in (scales, None):
            for run in backends(dequantize).values() if threads == 1 else [cpu.dequantize]:
                _check(run(codes, by, scheme, torch.bfloat16), codes, by, scheme)


def _check(
    found: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, scheme: Scheme
) -> None:
    wanted = dequantize.reference(codes, scales, scheme, torch.bfloat16)
    assert found.shape == wanted.shape
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found.view(torch.int16)[numbers], wanted.view(torch.int16)[numbers])


def test_a_scale_that_is_none_makes_its_cell_none() -> None:
    scheme = SCHEMES["mxfp4"]
    codes = torch.full((1, 32), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 255]], dtype=torch.uint8)
    for run in backends(dequantize).values():
        [row] = run(codes, scales, scheme, torch.bfloat16)
        assert (row[:32] == 1).all()
        assert row[32:].isnan().all()


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_tiles_of_float8_multiply_by_what_every_code_stands_for(rows) -> None:
    """Subnormals among them; a code that is no number spoils its own output alone."""
    scheme, layout, shape = SCHEMES["fp8_block"], TileLayout(inputs=4), (32, 16)
    codes = torch.arange(256).byte().repeat(2).view(shape)
    codes[7, 15] = codes[15, 15] = codes[23, 15] = 0  # of NaN; the last one stays
    tiles = torch.empty(layout.storage_shape(shape), dtype=torch.uint8)
    layout.write(tiles, shape, Box.full(shape), codes)
    x = torch.eye(16).bfloat16().repeat(3, 1)[:rows]
    for factor in (1.0, -0.75):
        scales = torch.full((32, 1), factor)
        got = quantized_linear(x, tiles, scales, None, layout, shape, scheme)
        wanted = factor * codes.view(torch.float8_e4m3fn).float().T.repeat(3, 1)[:rows]
        assert torch.equal(got[:, :31].float(), wanted[:, :31])
        assert bool(got[:, 31].isnan().all())

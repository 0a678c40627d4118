"""What adapters add to a linear: rows of several adapters in one product."""

from itertools import pairwise

import torch
from torch import Tensor

from rollout.kernels.op import op

TILE = 16  # the most rows of a tile
MOST_RANK = 128  # of the GPU's kernel, a program of which holds all of it in shared memory


@op
def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bounds: tuple[int, ...],
    rows: Tensor,
    tiles: Tensor,
) -> None:
    """Add ``scale * (x A^T) B`` to rows of ``y`` in place, by the adapter of each row.

    y: [T, outputs] and x: [T, inputs] in the dtype of the factors, their last dimension dense. a:
    [slots, parts, rank, inputs], b: [slots, rank, outputs]: part ``p`` of a slot's adapter is about
    outputs ``bounds[p]:bounds[p + 1]``. scales: float32 [slots, parts], 0 where the adapter has no
    such part. rows: int32 [n], the rows that have adapters, each once; tiles: int32 [tiles, 3] of
    (slot, start, stop), at most ``TILE`` of ``rows`` each, which they cover. Sums are float32, and
    rounded once, when they have been added; a row has the same bits in any batch. (S-LoRA, arXiv
    2311.03285, and Punica, 2310.18547.)
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    for slot, start, stop in tiles.tolist():
        factors = [each[slot].to(wide) for each in (a, b)]
        for row in rows[start:stop].tolist():  # by itself: its bits depend on no other
            taken, total = x[row].to(wide), y[row].to(wide)
            for part, (first, last) in enumerate(pairwise(bounds)):
                down = (factors[0][part] @ taken) * scales[slot, part]
                total[first:last] += down @ factors[1][:, first:last]
            y[row] = total.to(y.dtype)


def tiles_of(slots: Tensor) -> tuple[Tensor, Tensor]:
    """int64 ``order`` [n], which brings rows of ``slots`` [n] together, and int32 tiles of it."""
    order = slots.argsort(stable=True)
    found, counts = torch.unique_consecutive(slots[order], return_counts=True)
    blocks = (counts + (TILE - 1)) // TILE
    of = torch.repeat_interleave(blocks)  # of each tile, which of those found it is about
    stops = counts.cumsum(0)
    within = torch.arange(len(of), device=slots.device) - (blocks.cumsum(0) - blocks)[of]
    starts = (stops - counts)[of] + within * TILE
    ends = torch.minimum(starts + TILE, stops[of])
    return order, torch.stack([found[of], starts, ends], dim=1).to(torch.int32)


def lora_work(rows: Tensor, a: Tensor) -> Tensor:
    """float32 [n, parts, rank]: the products with A between the two kernels of an op."""
    return torch.empty((len(rows), a.shape[1], a.shape[2]), dtype=torch.float32, device=a.device)

"""What the first update would wait for: its kernels compiled and loaded."""

from __future__ import annotations

import torch

from rollout.kernels.copy_regions import copy_regions
from rollout.kernels.digest_regions import DigestedAs, digest_regions
from rollout.kernels.region_table import BLOCK, ROUNDS
from rollout.weights import Box


def warm_up_updates(dtype: torch.dtype, device: torch.device) -> None:
    """Copy and digest some elements as updates do: of ``dtype``, and of the float32 that trainers
    hold, in whole blocks, which most weights are.
    """
    shape = (BLOCK * ROUNDS,)
    target = torch.empty(shape, dtype=dtype, device=device)
    for given in {dtype, torch.float32}:
        source = torch.zeros(shape, dtype=given, device=device)
        copy_regions([target], [source])
        digest_regions([source], [DigestedAs(shape, Box.full(shape), dtype)])

"""What holds for the Triton kernels alone."""

from __future__ import annotations

import pytest
import torch

from rollout import kernels
from rollout.kernels.gpu_support import triton_runs

pytestmark = pytest.mark.skipif(not triton_runs(), reason="no Triton here")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tokens_without_a_slot_are_passed_over() -> None:
    """A captured graph pads its batch with them: nothing of theirs may reach the cache."""
    k, v = (torch.randn(3, 2, 8, device=DEVICE) for _ in "kv")
    table = torch.ones(3, 8, device=DEVICE)
    slots = torch.tensor([4, -1, 7], device=DEVICE)
    for op in (kernels.store_kv, kernels.rotary_store):
        caches = [torch.zeros(4, 2, 2, 8, device=DEVICE) for _ in "kv"]
        if op is kernels.store_kv:
            op.implementation("triton")(k, v, *caches, slots)
        else:
            op.implementation("triton")(k, k, v, table, table * 0, *caches, slots)
        for cache, given in zip(caches, (k, v), strict=True):
            wanted = torch.zeros_like(cache)
            wanted[2, :, 0], wanted[3, :, 1] = given[0], given[2]
            assert torch.equal(cache, wanted)

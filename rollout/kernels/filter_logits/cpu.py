"""Native ``filter_logits``: the edge is selected among the few logits that are high enough."""

import torch
from torch import Tensor

from rollout.kernels.filter_logits import filter_logits as op
from rollout.kernels.native import BF16, entry


def filter_logits(
    logits: Tensor,
    temperature: Tensor | None,
    best: Tensor,
    sums: Tensor,
    mass: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    bf16 = BF16.get(logits.dtype)
    if bf16 is None or logits.stride(1) != 1:
        return op.reference(logits, temperature, best, sums, mass, top_k, top_p, min_p)
    rows, vocab = logits.shape
    assert best.dtype == sums.dtype == min_p.dtype == torch.float32, "best, sums, min_p: float32"
    assert mass.dtype == top_p.dtype == torch.float64, "mass and top_p are float64"
    assert top_k.dtype == torch.int64, "top_k is int64"
    if temperature is not None:
        assert temperature.dtype == torch.float32, "temperatures are float32"
        temperature = temperature.contiguous()
    best, top_k, top_p, min_p = (t.contiguous() for t in (best, top_k, top_p, min_p))
    edges = torch.empty(rows)
    sums, mass = (t.clone(memory_format=torch.contiguous_format) for t in (sums, mass))
    entry("filter_logits")(
        *(logits.data_ptr(), logits.stride(0)),
        *(None if temperature is None else temperature.data_ptr(), best.data_ptr()),
        *(top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), edges.data_ptr()),
        *(sums.data_ptr(), mass.data_ptr(), rows, vocab, bf16, torch.get_num_threads()),
    )
    return edges, sums, mass

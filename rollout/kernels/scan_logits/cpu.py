"""Native ``scan_logits``: two passes over each row while it is in the cache, no float copy."""

import torch
from torch import Tensor

from rollout.kernels.native import BF16, entry
from rollout.kernels.scan_logits import SEGMENT
from rollout.kernels.scan_logits import scan_logits as op


def scan_logits(
    logits: Tensor, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bf16 = BF16.get(logits.dtype)
    if bf16 is None or logits.stride(1) != 1:
        return op.reference(logits, temperature)
    rows, vocab = logits.shape
    best = torch.empty(rows)
    ids = torch.empty(rows, dtype=torch.int64)
    sums = torch.empty(rows, -(-vocab // SEGMENT))
    mass = torch.empty(rows, dtype=torch.float64)
    if temperature is not None:
        assert temperature.dtype == torch.float32, "temperatures are float32"
        assert temperature.shape == (rows,), f"{temperature.shape} for {rows} rows"
        temperature = temperature.contiguous()
    entry("scan_logits")(
        *(logits.data_ptr(), logits.stride(0)),
        *(None if temperature is None else temperature.data_ptr(), best.data_ptr()),
        *(ids.data_ptr(), sums.data_ptr(), mass.data_ptr(), rows, vocab, bf16),
        torch.get_num_threads(),
    )
    return best, ids, sums, mass

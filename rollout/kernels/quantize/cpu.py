"""Native ``quantize`` to int8."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.native import address, entry
from rollout.kernels.quantize import quantize as op
from rollout.weights.quantization import Scheme


def quantize(values: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    n, k = values.shape
    known = values.dtype in (torch.bfloat16, torch.float32) and scheme.codes == "int8"
    if not known or not values.numel():
        return op.reference(values, scheme)
    if values.stride(1) != 1:
        values = values.contiguous()
    codes, scales = torch.empty(n, k, dtype=torch.int8), torch.empty(n, 1)
    entry("quantize_rows")(
        *(address(values), values.stride(0), values.dtype == torch.bfloat16, n, k),
        *(codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    return codes, scales

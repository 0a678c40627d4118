"""Native ``causal_conv``."""

import torch
from torch import Tensor

from rollout.kernels.causal_conv import causal_conv as op
from rollout.kernels.native import BF16, entry

MAX_WIDTH = 8  # as in delta.c


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    bf16, width = BF16.get(x.dtype), weight.shape[1]
    dense = weight.is_contiguous() and states.is_contiguous()
    given = x, weight, states, slots, query_starts, context_lens, bias
    if bf16 is None or not dense or width > MAX_WIDTH:
        return op.reference(*given)
    channels = x.shape[1]
    assert x.dtype == weight.dtype == states.dtype
    assert weight.shape[0] == channels
    assert states.shape[1:] == (channels, width - 1)
    assert bias is None or (bias.shape, bias.dtype) == ((channels,), x.dtype)
    bias = None if bias is None else bias.contiguous()
    assert len(slots) == len(context_lens) == len(query_starts) - 1
    x = x if x.stride(1) == 1 else x.contiguous()
    slots, starts, lengths = (i.int().contiguous() for i in (slots, query_starts, context_lens))
    out = torch.empty((len(x), channels), dtype=x.dtype)
    padded = entry("causal_conv")(
        *(x.data_ptr(), x.stride(0), weight.data_ptr()),
        *(None if bias is None else bias.data_ptr(), states.data_ptr(), slots.data_ptr()),
        *(starts.data_ptr(), lengths.data_ptr(), out.data_ptr(), len(slots), channels, width),
        *(bf16, torch.get_num_threads()),
    )
    return op.reference(*given) if padded else out

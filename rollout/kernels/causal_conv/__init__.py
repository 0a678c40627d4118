"""A short depthwise convolution over the tokens of each sequence, its last inputs carried on."""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from rollout.kernels.op import op


@op
def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """silu of ``bias[c] + sum_j weight[c, j] * x[t - K + 1 + j, c]`` within a sequence: [T, C].

    x: [T, C], the new tokens of sequences as ``ForwardBatch`` has them (``query_starts``,
    ``context_lens``, int32); weight: [C, K]; bias: [C]. states: [slots, C, K - 1], of which row
    ``slots[s]`` (int32, distinct) holds the inputs before sequence s's new tokens; they are zero
    where there are none, whatever the row holds. It is left holding its last K - 1 inputs. Slot -1:
    nothing is before the sequence, and nothing is kept. One dtype; sums in float32, rounded before
    the silu and after it.
    """
    assert x.shape[1] == weight.shape[0] == states.shape[1]
    assert states.shape[2] == weight.shape[1] - 1
    assert x.dtype == weight.dtype == states.dtype
    assert bias is None or (bias.shape, bias.dtype) == (x.shape[1:], x.dtype)
    out, starts = torch.empty_like(x), query_starts.tolist()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    more = None if bias is None else bias.to(wide)
    for s, (slot, length) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        rows = slice(starts[s], starts[s + 1])
        count = rows.stop - rows.start
        if not count:
            continue
        continues = length > count and slot >= 0
        before = states[slot] if continues else states.new_zeros(states.shape[1:])
        window = torch.cat((before, x[rows].T), dim=1)  # [C, K - 1 + count]
        sums = conv1d(window[None].to(wide), weight[:, None].to(wide), more, groups=len(weight))[0]
        out[rows] = silu(sums.T.to(x.dtype).to(wide)).to(x.dtype)
        if slot >= 0:
            states[slot] = window[:, count:]
    return out

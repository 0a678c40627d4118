"""Triton ``fused_experts``: two grouped products over (token, expert) pairs in the experts' order.

Pairs are sorted by expert and cut into blocks of one expert each; how many blocks there may be at
most follows from the shapes, so nothing is read back from the device and a graph can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.fused_experts import ExpertsLora, gate
from rollout.kernels.fused_experts import fused_experts as op
from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow
from rollout.kernels.silu_mul.gpu import silu_mul

_OUTPUTS = 64
_BYTES = 128  # of a row in one step over the inputs


def fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: int = 0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    clamped: tuple[float, float] | None = None,
    squared: bool = False,
    lora: ExpertsLora | None = None,
) -> Tensor:
    if x.dtype not in FLOATS or not x.dtype == w13.dtype == w2.dtype:
        return op.reference(x, w13, w2, experts, weights, first, b13, b2, clamped, squared, lora)
    tokens, chosen = experts.shape
    kept, device = len(w13), x.device
    assert w13.shape[0] == w2.shape[0], f"{w13.shape} and {w2.shape}: other numbers of experts"
    assert weights.shape == experts.shape, f"weights {weights.shape}, experts {experts.shape}"
    pairs = experts.reshape(-1)
    order = pairs.argsort(stable=True)  # (token, expert) pairs, grouped by expert
    bounds = torch.arange(first, first + kept + 1, device=device)
    starts = torch.searchsorted(pairs[order], bounds)  # [kept + 1]
    rows = 16 if len(pairs) <= 16 * kept else 64
    ends = ((starts.diff() + (rows - 1)) // rows).cumsum(0)  # blocks up to and with an expert
    most = triton.cdiv(len(pairs), rows) + kept if len(pairs) else 0
    owners = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
    x = x.contiguous()
    inner = x.new_zeros((len(pairs), w13.shape[1]))  # pairs of other ranks stay zero
    plan = (order, starts, ends, owners)
    _grouped(x, w13, b13, inner, plan, chosen, rows, gather=True)
    of = order // chosen, pairs[order] - first
    if lora is not None:
        lora.add(lora.w13, inner, lambda: x[of[0]], *of)
    plain = clamped is None and not squared
    inner = silu_mul(inner) if plain else gate(inner, clamped, squared)
    out = x.new_zeros((len(pairs), x.shape[1]))
    _grouped(inner, w2, b2, out, plan, chosen, rows, gather=False)
    if lora is not None:
        last = out[order]
        lora.add(lora.w2, last, inner, *of)
        out[order] = last
    weighted = out * weights.reshape(-1, 1)  # [T k, H]
    return weighted.view(tokens, chosen, x.shape[1]).sum(dim=1).to(x.dtype)


def _grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: tuple[Tensor, Tensor, Tensor, Tensor],
    chosen: int,
    rows: int,
    *,
    gather: bool,
) -> None:
    """Rows of tokens to rows in the experts' order (``gather``), or from there back to pairs."""
    kept, outputs, inputs = weight.shape
    order, starts, ends, owners = plan
    launch(
        _multiply,
        (len(owners), triton.cdiv(outputs, _OUTPUTS)),
        *(x, weight, out, order, starts, ends, owners, kept, chosen, outputs, inputs),
        *(*weight.stride(), weight if bias is None else bias.contiguous()),
        BIAS=bias is not None,
        GATHER=gather,
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=_BYTES // x.element_size(),
        IEEE=x.dtype == torch.float32,
        stages=3,
    )


@triton.jit
def _multiply(
    x,
    weight,
    out,
    order,
    starts,
    ends,
    owners,
    kept,
    chosen,
    outputs,
    inputs,
    of_expert,
    of_output,
    of_input,
    bias,
    BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IEEE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    expert = tl.load(owners + block)
    if expert < kept:
        before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(starts + expert + 1)
        place = tl.load(starts + expert) + (block - before) * ROWS + tl.arange(0, ROWS)
        live = place < stop
        pair = tl.load(order + place, mask=live, other=0)
        if GATHER:
            source = pair // chosen
            target = place
        else:
            source = place
            target = pair
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        weight += expert * of_expert
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            some = at < inputs
            a = tl.load(
                x + source[:, None] * inputs + at[None, :],
                mask=live[:, None] & some[None, :],
                other=0.0,
            )
            b = tl.load(
                weight + output[None, :] * of_output + at[:, None] * of_input,
                mask=(output < outputs)[None, :] & some[:, None],
                other=0.0,
            )
            total = multiply(a, b, total, IEEE)
        if BIAS:
            more = tl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0)
            total += more.to(tl.float32)[None, :]
        tl.store(
            out + target[:, None] * outputs + output[None, :],
            narrow(total, out.dtype.element_ty),
            mask=live[:, None] & (output < outputs)[None, :],
        )

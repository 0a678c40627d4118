"""Triton ``fused_experts``: two grouped products over (token, expert) pairs in the experts' order.

Pairs are sorted by expert and cut into blocks of one expert each; how many blocks there may be at
most follows from the shapes, so nothing is read back from the device and a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.fused_experts import ExpertsLora, gate
from rollout.kernels.fused_experts import fused_experts as op
from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow
from rollout.kernels.gpu_weight_codes import KINDS, code_values, columns_at_once, scale_values
from rollout.kernels.quantized_linear import quantize_rows
from rollout.kernels.silu_mul.gpu import silu_mul
from rollout.weights.quantization import Scheme

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
    products = grouped(w13, b13), grouped(w2, b2)
    assert w13.shape[0] == w2.shape[0], f"{w13.shape} and {w2.shape}: other numbers of experts"
    return in_order(x, experts, weights, first, len(w13), products, clamped, squared, lora)


@dataclass(frozen=True, slots=True)
class Plan:
    """``order``: the (token, expert) pairs, those of an expert together, from its ``starts`` on;
    blocks of ``rows`` of them have ``owners``, an expert's last block ends before its ``ends``.
    ``chosen``: the pairs of a token.
    """

    order: Tensor
    starts: Tensor
    ends: Tensor
    owners: Tensor
    rows: int
    chosen: int


#: rows, out, plan, and whether rows are of tokens and go to the experts' order, or from there to
#: pairs
Product = Callable[[Tensor, Tensor, Plan, bool], None]


def in_order(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    first: int,
    kept: int,
    products: tuple[tuple[int, Product], tuple[int, Product]],
    clamped: tuple[float, float] | None,
    squared: bool,
    lora: ExpertsLora | None,
) -> Tensor:
    """``fused_experts`` of ``kept`` experts by the two products of all, each with its outputs."""
    tokens, chosen = experts.shape
    device, (inner_size, up), (_, down) = x.device, *products
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
    inner = x.new_zeros((len(pairs), inner_size))  # pairs of other ranks stay zero
    plan = Plan(order, starts, ends, owners, rows, chosen)
    up(x, inner, plan, True)
    of = order // chosen, pairs[order] - first
    if lora is not None:
        lora.add(lora.w13, inner, lambda: x[of[0]], *of)
    plain = clamped is None and not squared
    inner = silu_mul(inner) if plain else gate(inner, clamped, squared)
    out = x.new_zeros((len(pairs), x.shape[1]))
    down(inner, out, plan, False)
    if lora is not None:
        last = out[order]
        lora.add(lora.w2, last, inner, *of)
        out[order] = last
    weighted = out * weights.reshape(-1, 1)  # [T k, H]
    return weighted.view(tokens, chosen, x.shape[1]).sum(dim=1).to(x.dtype)


def grouped(
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None = None,
    scheme: Scheme | None = None,
) -> tuple[int, Product]:
    """The outputs of a product, and the product: of weights [E, outputs, inputs], or of codes of a
    ``scheme`` and their ``scales`` [E, outputs, cells], both dense. Of int8 inputs are quantised,
    too, each row by itself; others are widened as they are read, and rounded to the inputs' dtype.
    """
    return weight.shape[1], partial(_grouped, weight, bias, scales, scheme)


def _grouped(
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    scheme: Scheme | None,
    x: Tensor,
    out: Tensor,
    plan: Plan,
    gather: bool,
) -> None:
    kept, outputs, inputs = weight.shape
    kind, cells, columns, width, factors = 0, 1, 1, _BYTES // x.element_size(), x
    if scheme is not None and scales is not None:
        kind, cells = KINDS[scheme.codes], scales.shape[2]
        inputs *= scheme.per_byte
        columns = scheme.columns or max(1, inputs)
        if scheme.codes == "int8":
            (x, factors), width = quantize_rows(x, scheme), _BYTES
        width = columns_at_once(scheme, width)
    launch(
        _multiply,
        (len(plan.owners), triton.cdiv(outputs, _OUTPUTS)),
        *(x, weight, out, plan.order, plan.starts, plan.ends, plan.owners),
        *(kept, plan.chosen, outputs, inputs, *weight.stride()),
        weight if bias is None else bias.contiguous(),
        *(weight if scales is None else scales, factors, cells, columns),
        BIAS=bias is not None,
        GATHER=gather,
        ROWS=plan.rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=width,
        IEEE=x.dtype == torch.float32,
        KIND=kind,
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
    scales,
    factors,
    cells,
    columns,
    BIAS: tl.constexpr,
    GATHER: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IEEE: tl.constexpr,
    KIND: tl.constexpr,
):
    """KIND: of codes (0: none), by ``scales``; of 1 int8 by int8, of rows by ``factors``."""
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
        scale_at = scales + (expert * outputs + output) * cells
        total = tl.zeros([ROWS, OUTPUTS], tl.int32 if KIND == 1 else tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            some = at < inputs
            a = tl.load(
                x + source[:, None] * inputs + at[None, :],
                mask=live[:, None] & some[None, :],
                other=0,
            )
            held = at // 2 if KIND == 3 else at
            b = tl.load(
                weight + output[None, :] * of_output + held[:, None] * of_input,
                mask=(output < outputs)[None, :] & some[:, None],
                other=0,
            )
            if KIND == 1:
                total = tl.dot(a, b, total, out_dtype=tl.int32)
            else:
                if KIND > 1:
                    scale = tl.load(scale_at + start // columns, mask=output < outputs, other=0)
                    wide = code_values(b, at[:, None], KIND) * scale_values(scale, KIND)[None, :]
                    b = narrow(wide, x.dtype.element_ty)
                total = multiply(a, b, total, IEEE)
        if KIND == 1:
            by = tl.load(factors + source, mask=live, other=0.0)[:, None]
            scale = tl.load(scale_at, mask=output < outputs, other=0.0)
            total = total.to(tl.float32) * (by * scale[None, :])
        if BIAS:
            more = tl.load(bias + expert * outputs + output, mask=output < outputs, other=0.0)
            total += more.to(tl.float32)[None, :]
        tl.store(
            out + target[:, None] * outputs + output[None, :],
            narrow(total, out.dtype.element_ty),
            mask=live[:, None] & (output < outputs)[None, :],
        )

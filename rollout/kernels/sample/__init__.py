"""Drawing a token from every row of logits, with what is to be known of that draw."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def sample(
    logits: Tensor,
    given: Tensor,
    numbers: Tensor,
    top_k: Tensor,
    draws: Tensor,
    filtered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(tokens, scores, least)``: int64 [R]; float32 [R, 3], raw, processed, log of the kept mass;
    and float32 [R], the least logit that filters left, minus infinity where a row has none.

    logits: [R, V]; given: [R] int64, a token that is scored instead of drawn where it is not
    negative; numbers: [R, 3] float32, temperature (0: the argmax), top_p, min_p; top_k: [R] int64,
    0 for all; draws: [R] float64 in [0, 1). ``filtered``: False says that no row has a filter.

    raw is the log-softmax of the logits. A drawn token comes from ``softmax(logits / temperature)``
    after min_p, top_k and top_p, in this order, by inverting the cumulative sum in the order of the
    vocabulary; processed is its logprob there. Tokens that tie with the last kept one stay. The
    argmax and given tokens have processed = raw and a kept mass of 1.
    """
    wide = logits.double()
    raw = wide.log_softmax(-1)
    tokens, scores, least = [], [], []
    for row, (temperature, top_p, min_p) in enumerate(numbers.tolist()):
        token, kept = int(given[row]), 0.0
        if token < 0 and temperature == 0:
            token = int(wide[row].argmax())
        if token >= 0:
            value = float(raw[row, token])
            tokens.append(token)
            scores.append((value, value, kept))
            least.append(-math.inf)
            continue
        scaled = wide[row] / temperature
        probs, limit = scaled.softmax(-1), int(top_k[row])
        left = _left(scaled, probs, min_p, limit, top_p)
        probs = probs.where(left, 0.0)
        mass = probs.cumsum(-1)
        token = int(torch.searchsorted(mass, draws[row] * mass[-1], right=True))
        token = min(token, int(probs.nonzero()[-1]))
        kept = min(0.0, float(mass[-1].log()))
        value = min(float(scaled.log_softmax(-1)[token]) - kept, 0.0)  # NaN stays
        tokens.append(token)
        scores.append((float(raw[row, token]), value, kept))
        filters = min_p > 0 or top_p < 1 or 0 < limit < len(probs)
        least.append(float(wide[row, left].min()) if filters and left.any() else -math.inf)
    found = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    like = wide.new_empty(0, dtype=torch.float32)
    return found, like.new_tensor(scores).view(-1, 3), like.new_tensor(least)


def _left(scaled: Tensor, probs: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """bool [V]: what is not dropped, as nothing is of a row with a NaN."""
    left = ~(probs < min_p * probs.max())
    if 0 < top_k < len(probs):
        left &= ~(scaled < scaled.where(left, -math.inf).topk(top_k).values[-1])
    if top_p < 1:
        ordered = probs.where(left, 0.0).sort(descending=True).values
        before = ordered.cumsum(-1) - ordered
        count = max(1, int((before < top_p * ordered.sum()).sum()))
        left &= ~(probs < ordered[count - 1])
    return left

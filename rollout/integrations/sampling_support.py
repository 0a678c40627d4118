"""The trainer's end of top_p, top_k and min_p: logprobs over the tokens that were left to draw.

A rollout that samples from a part of the vocabulary is a policy over that part. A trainer that
normalises over all of it compares two policies, and its importance ratios are wrong even for equal
weights. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.errors import InvalidRequest
from rollout.generation import GREEDY_BELOW, SamplingMask


def kept_logprobs(
    logits: Tensor,
    token_ids: Tensor | Sequence[int],
    mask: SamplingMask,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """What a completion's ``logprobs.processed`` are for the weights that gave ``logits``.

    ``logits``: [tokens, vocabulary] before temperature, those that give output token ``i`` in row
    ``i``; ``token_ids`` and ``mask``: of the completion (``return_sampling_mask``);
    ``temperature``: that of the request, or one for each token. float32 [tokens], with gradients:
    log-softmax of ``logits / temperature`` over the kept tokens; exact where neither penalties nor
    ``logit_bias`` changed logits. ``InvalidRequest`` where lengths differ or a token was not kept.
    """
    if mask is None:
        raise InvalidRequest(
            "the completion has no mask: ask with SamplingParams(return_sampling_mask=True)"
        )
    tokens = torch.as_tensor(token_ids, device=logits.device).long()
    if logits.dim() != 2 or not len(logits) == len(tokens) == len(mask):
        raise InvalidRequest(
            f"logits {list(logits.shape)}, {len(tokens)} tokens and a mask of {len(mask)}: one row "
            "of logits and one of the mask are needed for each token"
        )
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    scale = torch.where(scale < GREEDY_BELOW, 1.0, scale).expand(len(tokens))  # as greedy rows are
    x = logits.float() / scale[:, None]
    return x.gather(1, tokens[:, None])[:, 0] - _log_mass(x, tokens, mask)


def _log_mass(x: Tensor, tokens: Tensor, mask: SamplingMask) -> Tensor:
    """The log of the sum of exponentials of each row over what was kept."""
    counts = torch.from_numpy(mask.counts).to(x.device).long()
    width = int(mask.counts.max(initial=0))
    if width == 0:
        return x.logsumexp(-1)
    listed = torch.arange(width, device=x.device) < counts[:, None]
    ids = torch.zeros(listed.shape, dtype=torch.int64, device=x.device)
    ids[listed] = torch.from_numpy(mask.token_ids).to(x.device).long()
    if mask.token_ids.min() < 0 or mask.token_ids.max() >= x.shape[1]:
        raise InvalidRequest(f"a mask names tokens outside the {x.shape[1]} that logits are of")
    missing = ~((ids == tokens[:, None]) & listed).any(-1) & (counts > 0)
    if missing.any():
        at = int(np.flatnonzero(missing.cpu().numpy())[0])
        raise InvalidRequest(f"token {int(tokens[at])}, number {at}, is none that its mask kept")
    kept = x.gather(1, ids).masked_fill(~listed, float("-inf"))
    whole = counts == 0
    if not whole.any():
        return kept.logsumexp(-1)
    return torch.where(whole, x.logsumexp(-1), kept.masked_fill(whole[:, None], 0).logsumexp(-1))

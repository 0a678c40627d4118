"""Logprobs of given tokens in the bits of the engine's sampler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rollout.errors import InvalidRequest
from rollout.generation import GREEDY_BELOW
from rollout.kernels import scan_logits
from rollout.trainer_ops.patch import INTERFACE

Temperature = float | Tensor


def token_logprobs(
    model: nn.Module,
    ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    temperature: Temperature = 1.0,
) -> Tensor:
    """The log-probability of each token given those before it, with gradients, by a patched model.

    ids: [samples, tokens] int64; ``attention_mask`` and ``position_ids``: as the model takes them,
    see ``patch``. float32 [samples, tokens], 0 for padding and for the first token of a sequence.
    ``temperature``: one, or one of each sample; see ``logprobs_of``. ``InvalidRequest`` for a model
    that is not patched (any more), whose logprobs would be near to the engine's and not its bits,
    and for ids outside the vocabulary, the -100 of labels among them.
    """
    config = _config_of(model)
    if getattr(config, "_attn_implementation", None) != INTERFACE:
        raise InvalidRequest(
            f"token_logprobs takes a model that runs the engine's ops, and this "
            f"{type(model).__name__} does not: call it within `with patch(model):`, or take "
            "logprobs_of(model(ids).logits[:, :-1], ids[:, 1:])"
        )
    _check_ids(ids, config.get_text_config().vocab_size)
    logits: Tensor = model(
        ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).logits
    scale = torch.as_tensor(temperature, dtype=torch.float32)
    scale = scale[:, None].expand(len(ids), ids.shape[1] - 1) if scale.dim() else scale
    found = logprobs_of(logits[:, :-1], ids[:, 1:], scale)
    follows = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if attention_mask is not None:
        follows = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    if position_ids is not None:
        follows &= position_ids.expand(ids.shape)[:, 1:] != 0
    return torch.nn.functional.pad(found.masked_fill(~follows, 0.0), (1, 0))


def logprobs_of(logits: Tensor, ids: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """The log-softmax of ``logits / temperature`` at ``ids``, in the order of the sampler's sums.

    logits: [..., vocabulary] of a patched model, float32 or bfloat16; ids: [...] int64, below the
    vocabulary; ``temperature``: one, or [...]; below 1e-5 it counts as 1, as for a greedy request.
    float32 [...]: at 1 the bits of ``Logprobs.raw``, at the request's those of ``processed`` where
    no filter (top_p, top_k, min_p), penalty or bias was asked for. The gradient is that of
    ``log_softmax``.
    """
    if logits.shape[:-1] != ids.shape:
        raise InvalidRequest(
            f"logits {list(logits.shape)} and ids {list(ids.shape)}: one row of logits is needed "
            "for each id"
        )
    _check_ids(ids, logits.shape[-1])
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    scale = torch.where(scale < GREEDY_BELOW, 1.0, scale).expand(ids.shape).flatten()
    rows = logits.reshape(-1, logits.shape[-1])
    found: Tensor = _Score.apply(rows, ids.flatten(), scale)  # type: ignore[no-untyped-call]
    return found.view(ids.shape)


def _config_of(model: Any) -> Any:
    """A transformers model's config, also of one that DDP or FSDP1 has wrapped."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", None)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if ids.dtype != torch.int64:
        raise InvalidRequest(f"ids must be int64, got {ids.dtype}")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InvalidRequest(
            f"id {int(outside[0])} is outside the vocabulary of {vocab_size}; padding, and what is "
            "masked, needs an id within it, too"
        )


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        best, _, _, mass = scan_logits(logits, scale)
        lse = best.double() + mass.log()
        ctx.save_for_backward(logits, ids, scale, lse)
        chosen = logits.gather(1, ids[:, None])[:, 0].float() / scale
        return (chosen.double() - lse).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, scale, lse = ctx.saved_tensors
        chances = (logits.float() / scale[:, None] - lse.float()[:, None]).exp_()
        each = (grad / scale)[:, None]
        found = chances.mul_(-each).scatter_add_(1, ids[:, None], each)
        return found.to(logits.dtype), None, None

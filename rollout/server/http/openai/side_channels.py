"""Experts and kept sets of a completion as clients of other servers read them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from rollout.generation import Completion, RequestOutput, SamplingParams
from rollout.generation.all_layers import of_all_layers
from rollout.generation.packed import pack


def sglang_experts(output: RequestOutput, completion: Completion) -> str | None:
    """SGLang's: base64 of int32 alone; who reads it knows the layers and the experts of each."""
    experts = of_all_layers(output, completion)
    return None if experts is None else base64.b64encode(experts.astype("<i4").tobytes()).decode()


def vllm_experts(output: RequestOutput, completion: Completion) -> str | None:
    """vLLM's: base64 of an ``.npy`` file of uint8 or uint16."""
    experts = of_all_layers(output, completion)
    if experts is None:
        return None
    file = io.BytesIO()
    wide = experts.dtype != np.uint8
    np.save(file, experts.astype(np.uint16) if wide else experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def skyrl_experts(output: RequestOutput, completion: Completion) -> dict[str, Any] | None:
    """SkyRL's: base64 with shape and dtype, uint8 or int16."""
    experts = of_all_layers(output, completion)
    return None if experts is None else pack(experts)


def skyrl_support(completion: Completion, params: SamplingParams) -> dict[str, Any] | None:
    """SkyRL's: int32 [tokens, top_k], each row the sampled token and then the others that were
    kept, -1 behind them.
    """
    mask = completion.sampling_mask
    if mask is None:
        return None
    width = max(params.top_k, int(mask.counts.max(initial=1)))
    support = np.full((len(mask), width), -1, np.int32)
    for row, token, kept in zip(support, completion.token_ids, mask.rows(), strict=True):
        others = kept[kept != token]
        row[: len(others) + 1] = [token, *others]
    return pack(support)


def sglang_mask(completion: Completion, stop: int) -> dict[str, Any]:
    """SGLang's fields of the first ``stop`` tokens: what was kept, and logprobs over that."""
    mask = completion.sampling_mask
    if mask is None:
        return {}
    return {
        "output_token_sampling_mask": [row.tolist() for row in mask.rows()[:stop]],
        "output_token_sampling_logprobs": completion.logprobs.processed[:stop],
        "output_token_sampling_mask_length": stop,
    }


def beside_tokens(output: RequestOutput, completion: Completion, start: int = 0) -> dict[str, Any]:
    """What a choice of vLLM's has beside its tokens from ``start`` on, where it was asked for; the
    experts once it has ended.
    """
    found: dict[str, Any] = {}
    if completion.sampling_mask is not None:
        found["sampling_mask"] = [row.tolist() for row in completion.sampling_mask.rows()[start:]]
    if completion.finish_reason is not None and completion.routed_experts is not None:
        found["routed_experts"] = vllm_experts(output, completion)
    return found

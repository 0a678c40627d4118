"""What an engine says and how it drafts, to be compared with one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout import RequestOutput, Rollout, SamplingParams

ENGINE: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 200, "block_size": 8, "max_model_len": 128,
    "skip_tokenizer_init": True,
}  # fmt: skip


def answers(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None]]:
    """Of each sample its tokens and why it ended."""
    return [(one.token_ids, one.finish_reason) for out in outputs for one in out.outputs]


def logprobs(outputs: list[RequestOutput]) -> np.ndarray[Any, Any]:
    """Of all tokens of all samples."""
    return np.array([x for out in outputs for one in out.outputs for x in one.logprobs.raw])


def rates(engine: Rollout) -> tuple[int, int]:
    """Drafted tokens that were right, and all of them."""
    now = engine.metrics()
    return now.spec_accepted_tokens_total, now.spec_draft_tokens_total


def check_all_right(
    engine: Rollout,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    wanted: Sequence[list[RequestOutput]],
) -> None:
    """Of six samples of 40 tokens at most: what was ``wanted``, in few steps, all drafts right."""
    before, steps = rates(engine), engine.metrics().steps_total
    for each, known in zip(params, wanted, strict=True):
        found = engine.generate(prompts, each)
        assert answers(found) == answers(known)
        assert np.abs(logprobs(found) - logprobs(known)).max() < 1e-4
    accepted, drafted = np.subtract(rates(engine), before)
    assert accepted == drafted > 6 * 40 / 2
    assert engine.metrics().steps_total - steps < 40

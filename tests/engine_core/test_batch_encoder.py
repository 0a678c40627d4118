"""Arrays made from those of the step before are those that would be made from nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_core.harness import Start, request, run
from engine_core.toy_model import VOCAB

from rollout.engine.sequences.sequence import ScheduledBatch
from rollout.engine.steps import batch_encoder

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"logprobs": 2, "logit_bias": {3: 1.5}},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    {"n": 3, "prompt_logprobs": 0},
    {"allowed_token_ids": tuple(range(20))},
)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_after_another_is_encoded_as_one_by_itself(
    start: Start, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks and few places, so that some are preempted and some wait."""
    rng, whole = random.Random(seed), batch_encoder.encode_batch
    core = start(num_kv_blocks=rng.choice([40, 80]), max_num_seqs=rng.choice([4, 16]))
    encoder = core.loop.encoder
    encode, steps, anew = encoder.encode, 0, 0

    def counted(batch: ScheduledBatch, block_size: int) -> Any:
        nonlocal anew
        anew += 1
        return whole(batch, block_size)

    def both(batch: ScheduledBatch) -> Any:
        nonlocal steps
        steps += 1
        (args, tensors), (wanted_args, wanted) = encode(batch), whole(batch, encoder.block_size)
        assert args == wanted_args
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
        return args, tensors

    monkeypatch.setattr(batch_encoder, "encode_batch", counted)
    monkeypatch.setattr(encoder, "encode", both)
    for penalty in (0.0, 0.0, 0.5):  # with a penalty every step is encoded anew
        before = steps, anew
        requests = [
            request(
                f"{penalty}.{before}.{i}",
                [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
                max_tokens=rng.randint(6, 40),
                **rng.choice(SETTINGS),
                presence_penalty=penalty,
            )
            for i in range(rng.randint(2, 9))
        ]
        run(core, *requests)
        assert (anew - before[1] < steps - before[0]) == (penalty == 0)

"""The engine over real models and the inline executor, against transformers' greedy decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_core.harness import Sink, request, run
from tiny_models import write_tiny

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.errors import EngineClosed


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, arch)
    core = EngineCore(
        EngineConfig(
            model=str(tmp_path),
            device="cpu",
            num_kv_blocks=12,
            block_size=8,
            max_model_len=64,
            max_num_batched_tokens=16,
            num_threads=1,
        )
    )
    core.start()
    try:
        prompts = [[(1 + 11 * i + 7 * j) % 320 for j in range(5 + 4 * i)] for i in range(5)]
        calls = [
            request(str(i), p, temperature=0.0, max_tokens=16, prompt_logprobs=0)
            for i, p in enumerate(prompts)
        ]
        outs = run(core, *calls)
        assert core.stats().preemptions_total > 0
        for i, p in enumerate(prompts):
            sample = outs[str(i)].outputs[0]
            with torch.no_grad():
                whole = model.generate(
                    torch.tensor([p]), max_new_tokens=16, do_sample=False, pad_token_id=0
                )[0]
                logprobs = model(whole[None]).logits[0].log_softmax(-1)
            assert sample.token_ids == whole[len(p) :].tolist()
            expected = logprobs[:-1].gather(1, whole[1:, None])[:, 0]
            scored = [
                row[t] for row, t in zip(outs[str(i)].prompt_logprobs or [], p, strict=True) if row
            ]
            torch.testing.assert_close(
                torch.tensor([*scored, *sample.logprobs.raw]), expected, atol=1e-4, rtol=0
            )
    finally:
        core.close()
    with pytest.raises(EngineClosed):
        core.submit([request()], Sink(), stream=False)

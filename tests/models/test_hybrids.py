"""Models with recurrent states in the engine: whatever their states go through, what transformers
computes without a cache is what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams

SETTINGS = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "max_model_len": 128,
    "num_kv_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24, "timeout": 20.0,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PROMPTS = [[(3 + 11 * i + 7 * j) % 320 for j in range(7 + 9 * i)] for i in range(4)]


def start(path: Path, **settings: Any) -> Rollout:
    return Rollout(str(path), **{**SETTINGS, **settings})


def check(model: torch.nn.Module, prompt: list[int], sample: Any) -> None:
    """That the tokens are greedy, and their logprobs transformers', of one forward pass."""
    whole = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.no_grad():
        logprobs = (
            model(whole, use_cache=False).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        )
    chosen = torch.tensor(sample.token_ids)
    raw = torch.tensor(sample.logprobs.raw)
    assert (logprobs.gather(1, chosen[:, None])[:, 0] - raw).abs().max() < 1e-4
    top = logprobs.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert torch.equal(logprobs.argmax(-1)[clear], chosen[clear])


def test_chunks_preemption_prefix_hits_and_forks_give_what_transformers_computes(
    tmp_path: Path,
) -> None:
    model = write_tiny(tmp_path, "qwen3_next")
    with start(tmp_path, num_kv_blocks=16, state_snapshot_blocks=2) as rollout:
        for _turn in range(2):
            for prompt, output in zip(PROMPTS, rollout.generate(PROMPTS, GREEDY), strict=True):
                check(model, prompt, output.outputs[0])
        assert rollout.metrics().preemptions_total > 0
        assert rollout.metrics().state_snapshot_hits_total > 0


def test_forks_copy_the_state_at_the_end_of_their_prompt(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "qwen3_next")
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=9, ignore_eos=True)
    with start(tmp_path, max_num_seqs=3) as rollout:
        before = rollout.metrics()
        outputs = rollout.generate(PROMPTS, params)
        after = rollout.metrics()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            for sample in output.outputs:
                raw = torch.tensor(sample.logprobs.raw)
                whole = torch.tensor([[*prompt, *sample.token_ids]])
                with torch.no_grad():
                    logits = model(whole, use_cache=False).logits[0].float()
                wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
                wanted = wanted.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
                assert (wanted - raw).abs().max() < 1e-4
        assert len({tuple(s.token_ids) for s in outputs[0].outputs}) > 1
        assert after.state_snapshot_saves_total > before.state_snapshot_saves_total

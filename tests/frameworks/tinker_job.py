"""Tinker's SDK, as it is installed, samples from one server; prints what it saw as JSON.

python tinker_job.py URL KEY MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 6, 7, 8]


def main() -> None:
    url, key, model = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    models = [m.model_name for m in service.get_server_capabilities().supported_models]
    client = service.create_sampling_client(base_model=model)

    def sample(count: int, params: types.SamplingParams, **more: Any) -> Any:
        prompt = types.ModelInput.from_ints(PROMPT)
        return client.sample(prompt, count, params, **more).result(timeout=60)

    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    first = sample(
        1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3
    )
    last = sample(1, greedy, include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    several = sample(3, types.SamplingParams(max_tokens=4, seed=7, temperature=0.8, stop=[]))
    one = first.sequences[0]
    stopped = sample(1, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[one.tokens[2]]))
    told = {
        "models": models,
        "tokens": one.tokens,
        "logprobs": one.logprobs,
        "top": one.topk_logprobs,
        "stop": one.stop_reason,
        "sequence_id": one.sequence_id,
        "prompt": first.prompt_logprobs,
        "prompt_top": first.topk_prompt_logprobs,
        "last": last.prompt_logprobs,
        "several": [(s.tokens, s.sequence_id) for s in several.sequences],
        "stopped": [stopped.sequences[0].tokens, stopped.sequences[0].stop_reason],
        "refused": refused(sample),
    }
    print(json.dumps(told))


def refused(sample: Any) -> str:
    """What a user of the SDK sees where the engine refuses a sample."""
    try:
        sample(1, types.SamplingParams(max_tokens=4, top_p=7.0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was taken"


if __name__ == "__main__":
    main()

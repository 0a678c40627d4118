"""A mixture's answers with ``enable_rollout_routing_replay``, aligned by verl's own agent loop;
what comes of a prompt whose logits are not numbers; and verl's ``full_determinism``,
``logprobs_mode`` and ``calculate_log_probs``.

verl_jobs.py runs it: verl_experts_job.py MODEL
"""

import asyncio
import json
import sys

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from rollout.errors import EngineError
from rollout.integrations.verl import Server

torch.set_num_threads(1)
PROMPT, SPOILT = [5, 6, 7], [60, 5]


def made(**options):
    return Server(
        sys.argv[1], {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64},
        {"prompt_length": 32, "response_length": 32, "max_model_len": 64}, **options,
    )  # fmt: skip


async def options():
    """Of two runs: a group's answers, which have one id, with raw logprobs; one without any."""
    asked = {"temperature": 0.5, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
    runs = []
    for _ in range(2):
        server = made(seed=7, logprobs_mode="raw_logprobs")
        try:
            group = [server.generate(PROMPT, asked, "det-0") for _ in range(3)]
            runs.append(await asyncio.gather(*group))
            without = await server.generate(PROMPT, {**asked, "logprobs": False}, "det-0")
        finally:
            await server.shutdown()
    return {
        "runs": [[output.token_ids for output in outputs] for outputs in runs],
        "raw": runs[0][0].log_probs,
        "without": without.log_probs,
    }


async def course():
    server = made(return_routed_experts=True)
    try:
        asked = {"temperature": 0.0, "max_tokens": 8, "logprobs": True, "ignore_eos": True}
        output = await server.generate(PROMPT, asked, "a")
        try:
            failed = (await server.generate(SPOILT, asked, "b")).stop_reason
        except EngineError as error:
            failed = str(error)
    finally:
        await server.shutdown()
    told = AgentLoopOutput(
        prompt_ids=PROMPT, response_ids=output.token_ids, response_mask=[1] * 8,
        response_logprobs=output.log_probs, routed_experts=output.routed_experts,
        metrics=AgentLoopMetrics(),
    )  # fmt: skip
    return {
        "token_ids": output.token_ids,
        "failed": failed,
        "experts": output.routed_experts.tolist(),
        "aligned": told.as_dict()["routed_experts"].tolist(),
        **await options(),
    }


print(json.dumps(asyncio.run(course())))

"""A mixture's answers with ``enable_rollout_routing_replay``, aligned by verl's own agent loop; and
what comes of a prompt whose logits are not numbers.

python verl_experts_job.py MODEL
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


async def course():
    server = Server(
        sys.argv[1], {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64},
        {"prompt_length": 32, "response_length": 32, "max_model_len": 64},
        return_routed_experts=True,
    )  # fmt: skip
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
    }


print(json.dumps(asyncio.run(course())))

"""verl's configuration and its two ways of weights, a head among them; prints one JSON object.

verl_jobs.py runs it: verl_head_job.py MODEL OTHER_MODEL      both with prediction heads
"""

import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from verl.workers.config import RolloutConfig
from verl.workers.config.model import MtpConfig
from verl_replica import hybrid, run

from rollout import Rollout
from rollout.integrations.verl_checkpoint import TransportEngine
from rollout.models.config.model import ModelConfig

torch.set_num_threads(1)
model, other = sys.argv[1:]
old, new = (load_file(f"{path}/model.safetensors") for path in (model, other))
config = RolloutConfig(
    name="rollout", mode="async", prompt_length=32, response_length=64, dtype="float32",
    tensor_model_parallel_size=1, max_num_seqs=16, max_num_batched_tokens=256, load_format="dummy",
    engine_kwargs={"rollout": {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}},
    free_cache_engine=True, mtp=MtpConfig(enable=True, enable_rollout=True),
)  # fmt: skip


async def course():
    where = SimpleNamespace(path=model, local_path=model)
    replica, adapter = await hybrid(config, where)
    server = replica.server_handle
    reached = await server.reached_at.remote()
    engine = TransportEngine(bucket_size=1 << 20, is_master=True)
    engine.init_process_group([(server, *reached)])
    client = Rollout.connect(*reached)
    asked = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}

    async def stream(weights):
        for item in weights.items():
            yield item

    async def row(number, policy, head):
        before = client.metrics().spec_draft_tokens_total
        output = await server.generate.remote([5, 6, 7] * 3, dict(asked), f"r{number}")
        return {
            "components": sorted(client.receipts()[-1].components),
            "differing": client.check_weights({"policy": policy, "mtp": head}).differing,
            "token_ids": output.token_ids,
            "drafted": client.metrics().spec_draft_tokens_total - before,
        }

    found = {}
    await adapter.update_weights(iter(old.items()), global_steps=1)
    await adapter.release()
    await adapter.resume(["weights"])
    await adapter.update_weights(stream(new), global_steps=2)
    await adapter.resume(["kv_cache"])
    found["naive"] = await row(1, new, new)
    further = ModelConfig.from_directory(model).further_prefixes
    policy = {name: tensor for name, tensor in old.items() if not name.startswith(further)}
    await engine.send_weights(iter(policy.items()), global_steps=3)
    found["without"] = await row(2, old, new)
    await engine.send_weights(stream(new), global_steps=4)
    found["apart"] = await row(3, new, new)
    for one in (adapter._rollout, client):
        one.shutdown()
    engine._close()
    await server.shutdown.remote()
    return found


run(course)

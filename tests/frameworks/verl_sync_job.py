"""verl's own trainer workers, replica and CheckpointEngineManager over Ray; prints one JSON object.

verl_sync_job.py MODEL

"apart": a standalone replica, by our checkpoint engine, of three versions; "hybrid": one over the
trainer's workers, by verl's "naive", which sleeps, of two.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

os.environ.update(
    VERL_USE_EXTERNAL_MODULES="frameworks.verl_on_cpu,rollout.integrations.verl",
    VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda",
    RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1",
)  # fmt: skip

import numpy as np
import ray
import torch
import verl
from frameworks.verl_on_cpu import documented, overrides
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rollout import Rollout
from rollout.errors import RolloutError
from rollout.integrations.verl import Server

torch.set_num_threads(1)
[model] = sys.argv[1:]
SMALL = [
    "actor_rollout_ref.rollout.load_format=auto",
    "actor_rollout_ref.rollout.prompt_length=8",
    "actor_rollout_ref.rollout.response_length=8",
]
VERSIONS = {"apart": 3, "hybrid": 2}


class Trainer(ActorRolloutRefWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def poison(self):
        with torch.no_grad():
            next(self.actor.engine.module.parameters()).fill_(float("nan"))


def configured():
    where = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(where, version_base=None):
        return compose("ppo_trainer", [*documented(), *overrides(model), *SMALL])


async def started(kind):
    """The trainer's workers, a replica, and the manager of their weights."""
    config, hybrid = configured(), kind == "hybrid"
    section = config.actor_rollout_ref
    if hybrid:
        section.rollout.tensor_model_parallel_size = 2
        section.rollout.checkpoint_engine.backend = "naive"
    actors = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=True, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            ray.remote(Trainer), config=section, role="actor_rollout" if hybrid else "actor"
        ),
        device_name="cpu",
    )
    actors.init_model()
    rollout_config = omega_conf_to_dataclass(section.rollout)
    model_config = omega_conf_to_dataclass(section.model)
    replica = RolloutReplicaRegistry.get("rollout")(
        0, rollout_config, model_config, gpus_per_node=2
    )
    await (replica.init_hybrid(actors) if hybrid else replica.init_standalone())
    manager = CheckpointEngineManager(rollout_config.checkpoint_engine, actors, [replica])
    return config, actors, replica, manager


async def course(kind):
    config, actors, replica, manager = await started(kind)
    versions = VERSIONS[kind]
    driver = SimpleNamespace(config=config, actor_rollout_wg=actors)  # of verl's own driver methods
    found = {"steps": []}
    for step in range(1, versions + 1):
        if kind == "hybrid":
            await manager.sleep_replicas()
        took = await manager.update_weights(global_steps=step)
        batch, outputs = await sampled(replica.server_handle)
        old, _ = RayPPOTrainer._compute_old_log_prob(driver, batch)
        batch = batch.union(old)
        here, there = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
        steps = [output.extra_fields["global_steps"] for output in outputs]
        row = {"global_steps": steps, "difference": float((here - there).abs().max())}
        row |= {"logprobs": here[0].tolist(), "took": took}
        if step < versions:
            learned = RayPPOTrainer._update_actor(driver, scored(batch)).meta_info["metrics"]
            row |= {"grad_norm": float(np.mean(learned["actor/grad_norm"]))}
        found["steps"].append(row)
    actors.poison()
    try:
        await manager.update_weights(global_steps=versions + 1)
    except Exception as error:
        found["failed"] = str(error)
    await manager.resume_generation_replicas()
    _, outputs = await sampled(replica.server_handle)
    found["after"] = [output.extra_fields["global_steps"] for output in outputs]
    found |= await seen(replica)
    await replica.server_handle.shutdown.remote()
    for actor in (*actors.workers, *replica.workers, *replica.servers):
        ray.kill(actor)
    if kind == "apart":
        found["apart"] = await reached_from_other_nodes()
    return found


async def seen(replica):
    """The GPUs that its server's ranks may use, and those of its workers."""
    asked = [
        worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_accelerator_ids()["GPU"])
        for worker in replica.workers
    ]
    sees = replica.server_handle.__ray_call__.remote(
        lambda _: os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    return {
        "sees": await sees,
        "gpus": [each for own in await asyncio.gather(*asked) for each in own],
    }


async def reached_from_other_nodes():
    """A replica's server where the trainer may be elsewhere: not on loopback, and with a token."""
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 8, "max_model_len": 64}
    server = ray.remote(Server).remote(model, settings, {}, apart=True)
    address, token = await server.reached_at.remote()
    try:
        Rollout.connect(address).shutdown()
        refused = None
    except RolloutError as error:
        refused = str(error)
    with Rollout.connect(address, token) as rollout:
        version = rollout.weight_version
    await server.shutdown.remote()
    return {"host": address.rpartition(":")[0], "refused": refused, "version": version}


async def sampled(server):
    """Four answers to two prompts, as verl's padded batch."""
    prompts = torch.tensor([[5, 6, 7], [5, 6, 7], [8, 9, 10], [8, 9, 10]])
    ask = {"temperature": 1.0, "max_tokens": 8, "logprobs": True, "ignore_eos": True}
    outputs = await asyncio.gather(*(
        server.generate.remote(prompt.tolist(), {**ask, "seed": number}, f"r{number}")
        for number, prompt in enumerate(prompts)
    ))  # fmt: skip
    responses = torch.tensor([output.token_ids for output in outputs])
    ids = torch.cat([prompts, responses], 1)
    tensors = {
        "prompts": prompts, "responses": responses, "input_ids": ids,
        "attention_mask": torch.ones_like(ids), "response_mask": torch.ones_like(responses),
        "position_ids": torch.arange(ids.shape[1]).expand(ids.shape),
        "rollout_log_probs": torch.tensor([output.log_probs for output in outputs]),
    }  # fmt: skip
    said = {"temperature": 1.0, "global_token_num": tensors["attention_mask"].sum(-1).tolist()}
    return DataProto.from_dict(tensors, meta_info=said), outputs


def scored(batch):
    """With verl's own advantages of GRPO; higher ids are better."""
    rewards = batch.batch["responses"].float() / 1000
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, batch.batch["response_mask"], np.array([0, 0, 1, 1])
    )
    batch.batch["advantages"] = advantages
    return batch


ray.init(
    num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False,
    object_store_memory=100 << 20,
)  # fmt: skip
try:
    print(json.dumps({kind: asyncio.run(course(kind)) for kind in VERSIONS}), flush=True)
finally:
    ray.shutdown()

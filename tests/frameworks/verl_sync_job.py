"""verl's own trainer workers, replica and CheckpointEngineManager over Ray; prints one JSON object.

verl_sync_job.py MODEL

"apart": a standalone replica, by our checkpoint engine, of three versions; "hybrid": one over the
trainer's workers, by verl's "naive", which sleeps, of two.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
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
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.models.transformers import monkey_patch
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
VERSIONS = {"apart": 3, "hybrid": 2}
OVERRIDES = f"""
actor_rollout_ref.model.path={model}
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.dtype=float32
+actor_rollout_ref.actor.fsdp_config.mixed_precision={{param_dtype:fp32}}
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.optim.lr=0.001
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.load_format=auto
actor_rollout_ref.rollout.prompt_length=8
actor_rollout_ref.rollout.response_length=8
actor_rollout_ref.rollout.max_num_seqs=8
actor_rollout_ref.rollout.max_num_batched_tokens=256
actor_rollout_ref.rollout.tensor_model_parallel_size=1
+actor_rollout_ref.rollout.engine_kwargs.rollout.device=cpu
+actor_rollout_ref.rollout.engine_kwargs.rollout.num_threads=1
++actor_rollout_ref.rollout.engine_kwargs.rollout.num_kv_blocks=64
""".split()  # fmt: skip


class Trainer(ActorRolloutRefWorker):
    """verl names gloo twice where the device is a CPU; it leaves a group that is there alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        monkey_patch.is_trl_available = lambda: False  # it wants one older than this repository's
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=os.environ.get("DIST_INIT_METHOD"),
            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        )  # fmt: skip

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def poison(self):
        with torch.no_grad():
            next(self.actor.engine.module.parameters()).fill_(float("nan"))


def configured():
    where = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
    with initialize_config_dir(where, version_base=None):
        return compose("ppo_trainer", [*documented(), *OVERRIDES])


def documented():
    """The lines of the page that a user adds."""
    page = Path(__file__).parents[2] / "docs" / "frameworks" / "verl.md"
    lines = [line.strip() for line in page.read_text().splitlines() if line.startswith("    ")]
    found = [line for line in lines if line.lstrip("+").startswith("actor_rollout_ref.rollout.")]
    assert len(found) == 5, found
    return found


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
    await replica.server_handle.shutdown.remote()
    for actor in (*actors.workers, *replica.workers, *replica.servers):
        ray.kill(actor)
    if kind == "apart":
        found["apart"] = await reached_from_other_nodes()
    return found


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

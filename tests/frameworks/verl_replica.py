"""One replica of verl's over Ray, and its trainer's side of the weights, for jobs of the tests."""

import asyncio
import json
from types import SimpleNamespace

import ray
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry


@ray.remote(num_cpus=0)
class Worker:
    """In the place of a trainer's worker: the replica asks for its node."""


async def hybrid(config, where):
    """A replica of the model at ``where``, and what a trainer's first rank sends weights with."""
    replica = RolloutReplicaRegistry.get("rollout")(0, config, where, gpus_per_node=1)
    await replica.init_hybrid(SimpleNamespace(workers=[Worker.remote()]))
    kind = get_rollout_class("rollout", "async")
    adapter = kind.__new__(kind)
    adapter.config, adapter.model_config = config, where
    adapter.replica_rank, adapter.is_leader_rank = 0, True
    adapter._server = adapter._rollout = None
    return replica, adapter


def run(course):
    """Print what ``course`` finds on a small cluster of its own."""
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=100 << 20, **quiet)
    try:
        print(json.dumps(asyncio.run(course())), flush=True)
    finally:
        ray.shutdown()

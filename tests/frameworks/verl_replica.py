"""One replica of verl's over Ray, and its trainer's side of the weights, for jobs of the tests."""

import asyncio
import functools
import json
from types import SimpleNamespace

import ray
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry


@ray.remote(num_cpus=0)
class Worker:
    """In the place of a trainer's worker: the replica asks for its node."""


_replicas = []  # the latest


async def hybrid(config, where):
    """A replica of the model at ``where``, and what a trainer's first rank sends weights with."""
    for earlier in _replicas:
        for server in earlier.servers:  # its name is free then
            ray.kill(server)
    replica = RolloutReplicaRegistry.get("rollout")(0, config, where, gpus_per_node=1)
    _replicas[:] = [replica]
    await replica.init_hybrid(SimpleNamespace(workers=[_worker()]))
    kind = get_rollout_class("rollout", "async")
    adapter = kind.__new__(kind)
    adapter.config, adapter.model_config = config, where
    adapter.replica_rank, adapter.is_leader_rank = 0, True
    adapter._server = adapter._rollout = None
    return replica, adapter


@functools.cache
def _worker():
    """One for all replicas: verl is imported for it."""
    return Worker.remote()


def run(course):
    """Print what ``course`` finds, on the cluster of all jobs of this process."""
    if not ray.is_initialized():
        quiet = {"include_dashboard": False, "log_to_driver": False}
        ray.init(num_cpus=2, object_store_memory=100 << 20, **quiet)
    print(json.dumps(asyncio.run(course())), flush=True)

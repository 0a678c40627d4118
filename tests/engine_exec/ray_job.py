"""An engine over two nodes of a real Ray cluster, one of which is killed; prints one JSON object.

python ray_job.py MODEL OTHER_MODEL
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_ASYNC_ERROR_HANDLING="1")
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1")
os.environ.pop("RAY_ADDRESS", None)

import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from rollout import ConfigError, DeadlineExceeded, Rollout, WorkerDied
from rollout.engine.executors import ray as executor
from rollout.server.verbs import server_info

model, other = sys.argv[1:]
extension = f"{Path(__file__).with_name('norms.py')}:Norms"
settings = {"device": "cpu", "num_kv_blocks": 64, "tensor_parallel_size": 2, "executor": "ray"}
asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
found = {}


def refused(kind, **more):
    try:
        Rollout(model, **{**settings, **more}).shutdown()
    except kind as error:
        return str(error)


def tokens(rollout):
    [output] = rollout.generate([[5, 6, 7]], asked)
    return list(output.outputs[0].token_ids)


class Holder:
    """An actor that has an engine."""

    def __init__(self):
        self.rollout = Rollout(model, **settings)

    def tokens(self):
        return tokens(self.rollout)


def until_all_is_free():
    until = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 2.0 and time.monotonic() < until:
        time.sleep(0.2)
    return ray.available_resources().get("CPU")


found["no cluster"] = refused(ConfigError)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
ray.init(address=cluster.address, log_to_driver=False)
try:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    found["no room"] = refused(DeadlineExceeded, tensor_parallel_size=4, start_timeout=2.0)
    executor.PATIENCE = 1.0
    found["never"] = refused(ConfigError, tensor_parallel_size=4)
    found["no GPUs"] = refused(ConfigError, device="cuda")
    options = {"num_cpus": 0, "max_restarts": 1, "max_task_retries": 1}
    holder = ray.remote(Holder).options(**options).remote()
    found["of an actor"] = [ray.get(holder.tokens.remote())]
    ray.kill(holder, no_restart=False)
    found["of an actor"].append(ray.get(holder.tokens.remote()))
    ray.kill(holder)
    found["free"] = until_all_is_free()
    group = ray.util.placement_group([{"CPU": 1}] * 2, name="mine", strategy="SPREAD")
    with Rollout(
        model, ray_placement_group="mine", worker_extension_cls=extension, **settings
    ) as rollout:
        placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
        found["nodes"] = len(set(placed.values()))
        found["told"] = rollout._loop.run(server_info(rollout._async, "raw"))
        names = ["ROLLOUT_INSTANCE_ID", "NCCL_SOCKET_IFNAME", "NCCL_ASYNC_ERROR_HANDLING"]
        found["environment"] = rollout.collective_rpc("environment", args=names)
        found["instance"] = rollout._async.backend.core._executor.instance
        found["before"] = tokens(rollout)
        receipt = rollout.update_weights(load_file(f"{other}/model.safetensors"))
        found["version"] = receipt.version
        found["after"] = tokens(rollout)
        with Rollout.connect(rollout.address) as client:
            receipt = client.update_weights(load_file(f"{model}/model.safetensors"))
            found["from another process"] = receipt.transport
            found["again"] = tokens(client)
        cluster.remove_node(second, allow_graceful=False)
        began = time.monotonic()
        try:
            while True:
                tokens(rollout)
        except WorkerDied as error:
            found["died"] = str(error)
        found["noticed"] = time.monotonic() - began
    ray.util.remove_placement_group(group)
    left = ray.util.placement_group_table().values()
    found["left"] = [group["state"] for group in left if group["state"] != "REMOVED"]
finally:
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))

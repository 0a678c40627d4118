"""An engine over two nodes of a real Ray cluster, one of which is killed; prints one JSON object.

python ray_job.py MODEL OTHER_MODEL
"""

import json
import os
import sys
import time

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1")
os.environ.pop("RAY_ADDRESS", None)

import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from rollout import ConfigError, DeadlineExceeded, Rollout, WorkerDied

model, other = sys.argv[1:]
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


found["no cluster"] = refused(ConfigError)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
ray.init(address=cluster.address, log_to_driver=False)
try:
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    found["no room"] = refused(DeadlineExceeded, tensor_parallel_size=4, start_timeout=2.0)
    with Rollout(model, **settings) as rollout:
        groups = ray.util.placement_group_table().values()
        [placed] = [g["bundles_to_node_id"] for g in groups if g["state"] == "CREATED"]
        found["nodes"] = len(set(placed.values()))
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
    left = ray.util.placement_group_table().values()
    found["left"] = [group["state"] for group in left if group["state"] != "REMOVED"]
finally:
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))

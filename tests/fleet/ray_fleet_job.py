"""``rollout fleet MODEL --ray`` on a real Ray cluster that loses nodes; prints one JSON object.

python ray_fleet_job.py MODEL OTHER_MODEL RECORD
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1")
os.environ.pop("RAY_ADDRESS", None)

import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from rollout import ConfigError, EngineConfig, Rollout
from rollout.engine.executors import ray as executor
from rollout.fleet.launching.ray_launcher import RayLauncher

model, other, record = sys.argv[1:]
asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
SMALL = "--device cpu --num-kv-blocks 64 --max-model-len 256 --num-threads 1"
FLAGS = f"{SMALL} --port 0 --grpc-port 0 --quorum 1"
PREEMPTION = 2  # Ray's DRAIN_NODE_REASON_PREEMPTION
LIMIT = 120.0  # seconds of each wait


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{http}{path}", data, kind)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def serving():
    rows = call("/fleet/members")["members"]
    return sorted(row["name"] for row in rows if row["status"] == "serving")


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, (call("/fleet/members"), call("/fleet/replicas"))
        time.sleep(0.2)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def started(*words):
    """A front, and its HTTP and gRPC addresses."""
    front = subprocess.Popen(
        [*fleet, *words, "--ray", cluster.address], stdout=subprocess.PIPE, text=True
    )
    line = front.stdout.readline().split()
    return front, *(word.partition("=")[2] for word in line[1:])


def engines():
    """The actors that outlive a front."""
    return [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]


def groups():
    """Placement groups that are there still, after a while."""
    deadline = time.monotonic() + 30
    while True:
        states = [group["state"] for group in ray.util.placement_group_table().values()]
        left = [state for state in states if state != "REMOVED"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def places():
    """The node of each member, by its name."""
    found = {}
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            name = "-".join(group["name"].split("-")[2:])
            found[name] = group["bundles_to_node_id"][0]
    return found


found = {}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
ray.init(address=cluster.address, log_to_driver=False)
nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(2))}
cluster.wait_for_nodes()
fleet = [sys.executable, "-W", "ignore", "-m", "rollout", "fleet", model, *FLAGS.split()]
few = [*fleet, "--replicas", "1", "--tensor-parallel-size", "2", "--start-timeout", "2"]
done = subprocess.run([*few, "--ray", cluster.address], capture_output=True, text=True, timeout=60)
found["no room"] = [done.returncode, done.stderr.splitlines()[-1]]
executor.PATIENCE = 0.0
replica = RayLauncher(
    EngineConfig(model=model, device="cpu", tensor_parallel_size=2), [], None
).launch("r")
try:
    replica.ready()
except ConfigError as error:
    found["never"] = str(error)
replica.end()
front, http, grpc = started("--replicas", "2", "--max-replicas", "3")
try:
    until(lambda: serving() == ["replica-0", "replica-1"])
    found["nodes"] = len(set(places().values()))
    with Rollout.connect(grpc) as client:
        found["both"] = client.update_weights(load_file(f"{other}/model.safetensors")).details
        found["after"] = tokens(client.generate([[5, 6, 7]] * 4, asked))
        # One node is to go, and says so: its member leaves, and another comes on a new node.
        third = cluster.add_node(num_cpus=1)
        nodes[third.node_id] = third
        until(lambda: len(ray.nodes()) == 4)
        goes = places()["replica-1"]
        gcs = ray._private.worker.global_worker.gcs_client
        deadline = int((time.time() + 600) * 1000)
        found["drained"], _ = gcs.drain_node(goes, PREEMPTION, "spot", deadline)
        until(lambda: serving() == ["replica-0", "replica-2"])
        found["moved"] = places()["replica-2"] == third.node_id
        cluster.remove_node(nodes.pop(goes), allow_graceful=False)
        found["joined"] = tokens(client.generate([[5, 6, 7, n] for n in range(8)], asked))
        # One goes without a word.
        began = time.monotonic()
        cluster.remove_node(nodes.pop(places()["replica-0"]), allow_graceful=False)
        found["without"] = tokens(client.generate([[5, 6, 7]] * 4, asked))
        found["seconds without"] = time.monotonic() - began
        until(lambda: "room" in call("/fleet/replicas")["starting"].get("replica-0", ""))
        found["waits"] = call("/fleet/replicas")["starting"]
        [row] = [row for row in call("/fleet/members")["members"] if row["name"] == "replica-0"]
        found["gone"] = row["why"]
        # What waits for room is what the cluster's autoscaler adds a node for, and is given up.
        asking = ray.util.placement_group_table().values()
        found["pending"] = [g["bundles"]["0"] if "0" in g["bundles"] else g["bundles"][0]
                            for g in asking if g["state"] == "PENDING"]  # fmt: skip
        receipt = client.update_weights(load_file(f"{model}/model.safetensors"))
        found["one"] = receipt.details["members"]
        found["fewer"] = call("/fleet/replicas", {"count": 1})
        until(lambda: not call("/fleet/replicas")["starting"])
        found["members"] = [row["name"] for row in call("/fleet/members")["members"]]
        found["left"] = tokens(client.generate([[5, 6, 7]], asked))
    front.send_signal(signal.SIGINT)
    found["status"] = front.wait(LIMIT)
    found["groups"] = groups()
    # Of a front that is killed the next one with its record has the engines, and what they hold.
    kept = ["--replicas", "1", "--record", record]
    front, http, grpc = started(*kept)
    with Rollout.connect(grpc) as client:
        client.update_weights(load_file(f"{other}/model.safetensors"))
    killed = engines()
    front.kill()
    front.wait(LIMIT)
    try:
        RayLauncher(EngineConfig(model=model, device="cpu"), [other], None).take_over(record, 1)
    except ConfigError as error:
        found["other words"] = str(error)
    front, http, grpc = started(*kept)
    found["same engines"] = (len(killed), engines() == killed)
    until(lambda: serving() == ["replica-0"])
    with Rollout.connect(grpc) as client:
        found["kept"] = tokens(client.generate([[5, 6, 7]], asked))
    front.terminate()
    found["ended"] = [front.wait(LIMIT), groups(), engines()]
finally:
    if front.poll() is None:
        front.kill()
        front.wait()
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))

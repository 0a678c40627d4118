"""An engine and a fleet on a Ray cluster that has a head alone, and an autoscaler: it adds nodes as
placement groups ask, and takes those that are idle. Prints one JSON object.

python ray_autoscaler_job.py MODEL OTHER_MODEL first|second

The autoscaler (Ray's first or second) is the real one, and its nodes are processes of this machine.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1")
os.environ.pop("RAY_ADDRESS", None)

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from safetensors.torch import load_file

from rollout import ConfigError, DeadlineExceeded, EngineConfig, Rollout
from rollout.engine.executors import ray as executor
from rollout.fleet.launching import ray_launcher

model, other, which = sys.argv[1:]
LIMIT = 120.0  # seconds of each wait
STORE = 80 << 20  # bytes of a node's object store
HEAD, NODES = "ray.head.default", 3
UNUSED = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
)  # fmt: skip
SMALL = "--device cpu --num-kv-blocks 64 --max-model-len 256 --num-threads 1"
FLAGS = f"{SMALL} --port 0 --grpc-port 0 --quorum 1"
asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def cluster(folder, port, clients):
    """The process of a head that has no CPU, with an autoscaler of nodes that have one each."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    worker = {"CPU": 1, "object_store_memory": STORE}
    config = {
        "cluster_name": "test", "max_workers": NODES, "idle_timeout_minutes": 0.03,
        "provider": {
            "type": "external", "module": provider, "gcs_address": f"127.0.0.1:{port}",
            "use_node_id_as_ip": True, "disable_node_updaters": True, "launch_multiple": True,
            "disable_launch_config_check": True, "head_node_id": FAKE_HEAD_NODE_ID,
        },
        **{key: [] for key in UNUSED}, "file_mounts": {}, "auth": {},
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "max_workers": NODES},
        },
    }  # fmt: skip
    path = Path(folder) / "autoscaler.json"
    path.write_text(json.dumps(config))
    settings = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    if which == "second":
        settings |= {
            "RAY_enable_autoscaler_v2": "1", "RAY_NODE_TYPE_NAME": HEAD,
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }  # fmt: skip
    flags = [
        "--head", "--block", "--num-cpus=0", f"--port={port}", "--node-ip-address=127.0.0.1",
        f"--ray-client-server-port={clients}", "--include-dashboard=false", f"--temp-dir={folder}",
        f"--object-store-memory={STORE}", f"--autoscaling-config={path}",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", *flags],
        env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def answers(port):
    assert head.poll() is None, "the head has ended"
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


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
        assert time.monotonic() < deadline, [node["Resources"] for node in ray.nodes()]
        time.sleep(0.2)


def tokens(rollout, count=1):
    prompts = [[5, 6, 7, n] for n in range(count)]
    return [list(output.outputs[0].token_ids) for output in rollout.generate(prompts, asked)]


def nodes():
    """How many the cluster has beside its head."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) - 1


def refused(size, seconds):
    try:
        Rollout(model, **{**settings, "tensor_parallel_size": size}, start_timeout=seconds)
    except (ConfigError, DeadlineExceeded) as error:
        return [type(error).__name__, str(error)]


def left():
    """Processes of the cluster, which all name its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if folder.encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


began = time.monotonic()
found = {"seconds": {}}


def lap(name):
    found["seconds"][name] = round(time.monotonic() - began, 1)
    print(found["seconds"], file=sys.stderr, flush=True)


def stop(number, frame):
    raise TimeoutError("it takes too long")


settings = {"device": "cpu", "num_kv_blocks": 64, "tensor_parallel_size": 2, "executor": "ray"}
executor.PATIENCE = 1.0
with socket.socket() as one, socket.socket() as another:
    for free in (one, another):
        free.bind(("127.0.0.1", 0))
    port, clients = one.getsockname()[1], another.getsockname()[1]
signal.signal(signal.SIGALRM, stop)
signal.alarm(int(3 * LIMIT))
scratch = tempfile.TemporaryDirectory(prefix="ray")  # sockets' paths are short
folder = scratch.name
head = cluster(folder, port, clients)
front = None
try:
    until(lambda: answers(port))
    ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
    lap("head")
    found["at first"] = nodes()
    words = [model, *FLAGS.split(), "--replicas", "1", "--max-replicas", "2"]
    front = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "rollout", "fleet", *words, "--ray",
         f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with Rollout(model, **settings) as rollout:  # meanwhile
        found["engine"] = tokens(rollout)
        lap("engine")
    found["too many"] = refused(NODES + 1, 10.0)
    lap("refused")
    http, grpc = (word.partition("=")[2] for word in front.stdout.readline().split()[1:])
    until(lambda: serving() == ["replica-0"])
    lap("replica")
    until(lambda: nodes() == 1)  # the engine's have gone
    lap("one node")
    with Rollout.connect(grpc) as client:
        client.update_weights(load_file(f"{other}/model.safetensors"))
        call("/fleet/replicas", {"count": 2})
        until(lambda: "autoscaler" in call("/fleet/replicas")["starting"].get("replica-1", ""))
        found["waits"] = call("/fleet/replicas")["starting"]["replica-1"]
        until(lambda: serving() == ["replica-0", "replica-1"])
        lap("two")
        found["two"] = nodes()
        found["joined"] = tokens(client, 8)
        call("/fleet/replicas", {"count": 1})
        until(lambda: nodes() == 1)
        lap("fewer")
        found["members"] = serving()
        found["after"] = tokens(client, 8)
    front.send_signal(signal.SIGINT)
    found["more lines"], _ = front.communicate(timeout=LIMIT)
    found["status"] = front.returncode
    until(lambda: nodes() == 0)
    lap("none")
    # An engine that is to outlive its front, and that no other front comes for, ends by itself.
    ray_launcher.ORPHANED, ray_launcher._VISIT = 5.0, 0.5
    words = [model, *SMALL.split(), "--insecure"]
    launcher = ray_launcher.RayLauncher(EngineConfig(model=model, device="cpu"), words, None)
    found["none before"] = launcher.take_over(folder, 1)
    replica = launcher.launch("replica-0")
    replica.ready()
    found["kept"] = nodes()
    replica._over = True  # as if this process was no more
    until(lambda: nodes() == 0)
    found["actors"] = ray.util.list_named_actors(all_namespaces=True)
    lap("orphan")
finally:
    if front is not None and front.poll() is None:
        front.kill()
        front.wait()
    ray.shutdown()
    head.terminate()
    head.wait()
    for pid in left():
        os.kill(pid, signal.SIGKILL)
    scratch.cleanup()
lap("end")
print(json.dumps(found))

"""The config of the RayService in deploy/ on a real Ray cluster, put to its dashboard as KubeRay's
operator does; prints one JSON object.

python ray_serve_job.py MODEL
"""

import contextlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", ROLLOUT_TOKEN="of-the-pods-environment")
os.environ.pop("RAY_ADDRESS", None)

import psutil
import ray
import yaml
from free_ports import free_port
from ray import serve
from ray.cluster_utils import Cluster

from rollout import Rollout

(model,) = sys.argv[1:]
DEPLOY = Path(__file__).parents[2] / "deploy/kubernetes/kuberay/service.yaml"
LIMIT = 240.0  # seconds of each wait
asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def of_the_manifest():
    service = next(d for d in yaml.safe_load_all(DEPLOY.read_text()) if d["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    return yaml.safe_load(service["spec"]["serveConfigV2"]), cluster


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def put(document):
    request = urllib.request.Request(
        f"{dashboard}/api/serve/applications/", json.dumps(document).encode(),
        {"content-type": "application/json"}, method="PUT",
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=60).close()


def until_running():
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            application = get(f"{dashboard}/api/serve/applications/")["applications"]["rollout"]
        except (KeyError, OSError) as error:
            application = {"status": repr(error)}
        if application["status"] == "RUNNING":
            return
        assert time.monotonic() < deadline, application
        time.sleep(0.3)


def otherwise(where):
    """What Serve answers once it is not that any more; meanwhile it may not answer."""
    deadline = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(OSError):
            if (anew := get(serve_at)) != where:
                return anew
        assert time.monotonic() < deadline
        time.sleep(0.3)


def tokens(client):
    return [list(o.outputs[0].token_ids) for o in client.generate([[5, 6, 7]] * 4, asked)]


def fronts():
    """Of ours on this machine: their processes."""
    rows = psutil.process_iter(["cmdline"])
    return [row for row in rows if {"fleet", "--ray", model} <= set(row.info["cmdline"] or ())]


found = {}
config, manifest = of_the_manifest()
head = manifest["headGroupSpec"]["rayStartParams"]
resources = json.loads(json.loads(head["resources"].replace("'", "")))
port = free_port()
cluster = Cluster(
    initialize_head=True,
    head_node_args={
        "num_cpus": int(head["num-cpus"]), "resources": resources, "include_dashboard": True,
        "dashboard_port": port,
    },
)  # fmt: skip
dashboard = f"http://127.0.0.1:{port}"
ray.init(address=cluster.address, log_to_driver=False)
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
[application] = config["applications"]
words = [word for word in application["args"]["fleet"] if not word.startswith("--tls")]
words[0] = model
words += ["--port=0", "--grpc-port=0", "--host=127.0.0.1", "--device=cpu", "--num-threads=1"]
words += ["--num-kv-blocks=64", "--max-model-len=256", "--replicas=1"]
application["args"]["fleet"] = words
config["http_options"] = {"host": "127.0.0.1", "port": free_port()}
serve_at = f"http://127.0.0.1:{config['http_options']['port']}"
try:
    put(config)
    until_running()
    where = get(serve_at)
    with urllib.request.urlopen(f"{serve_at}/-/healthz", timeout=30) as reply:
        found["healthz"] = reply.status
    with Rollout.connect(where["grpc"], token=os.environ["ROLLOUT_TOKEN"]) as client:
        found["tokens"] = tokens(client)
    # A front that ends is started again, with engines of its own.
    [front] = fronts()
    front.kill()
    front.wait(LIMIT)
    anew = otherwise(where)
    with Rollout.connect(anew["grpc"], token=os.environ["ROLLOUT_TOKEN"]) as client:
        found["again"] = tokens(client)
finally:
    put({"applications": []})
    deadline = time.monotonic() + LIMIT
    while fronts() and time.monotonic() < deadline:
        time.sleep(0.2)
    found["left"] = len(fronts())
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
print(json.dumps(found))

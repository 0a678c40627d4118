"""What deploy/ holds is what Kubernetes' API takes, and starts `rollout` with flags that it has."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rollout.cli.main import make_parser
from rollout.cli.service import LAST_WORD

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OPERATORS = {kind: Path(__file__).parent / "crds" / f"{kind}.json" for kind in (
    "RayService", "ServiceMonitor"
)}  # fmt: skip


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.relative_to(DEPLOY)}:{document['kind']}", document)
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize(("where", "document"), documents(), ids=lambda value: str(value)[:60])
def test_every_document_has_the_apis_schema(where: str, document: dict[str, Any]) -> None:
    assert document.get("metadata") or document.get("resources") or document["patches"], where
    if document["kind"] not in ("Kustomization", "Component"):
        check(document)


def check(document: dict[str, Any]) -> None:
    """By the API's schema, or the one of the operator whose resource it is."""
    if document["kind"] not in OPERATORS:
        kubernetes_validate.validate(document, "1.34", strict=True)
        return
    schema = strict(json.loads(OPERATORS[document["kind"]].read_text()))
    jsonschema.Draft202012Validator(schema).validate(document)
    for template in pod_templates(document):
        name = {"name": "of-a-pod"}
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": name, "template": template})


def strict(schema: Any) -> Any:
    """What a schema does not name is a mistake: the API server would drop it."""
    if not isinstance(schema, dict):
        return schema
    schema = {name: strict(inner) for name, inner in schema.items()}
    if schema.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    free = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    whole = schema.get("properties", {}).get("metadata") == {"type": "object"}
    if whole:  # that of every resource
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    if isinstance(schema.get("properties"), dict) and not free:
        schema.setdefault("additionalProperties", False)
    return schema


def pod_templates(document: Any) -> list[dict[str, Any]]:
    """Wherever they are in it."""
    if isinstance(document, list):
        return [found for inner in document for found in pod_templates(inner)]
    if not isinstance(document, dict):
        return []
    here = [document["template"]] if "template" in document else []
    return here + [found for inner in document.values() for found in pod_templates(inner)]


def of_kind(name: str, kind: str) -> dict[str, Any]:
    """The first of it in that file."""
    return next(d for where, d in documents() if where == f"kubernetes/{name}:{kind}")


@pytest.mark.parametrize(
    ("name", "kind", "path", "wrong"),
    [
        ("engine/engine.yaml", "StatefulSet", "spec/replica", 1),
        ("monitoring/monitor.yaml", "ServiceMonitor", "spec/endpoints/0/intervall", "15s"),
        ("monitoring/monitor.yaml", "ServiceMonitor", "spec/endpoints/0/interval", "a while"),
        ("kuberay/service.yaml", "RayService", "spec/serveConfig", "applications: []"),
        ("kuberay/service.yaml", "RayService", "spec/upgradeStrategy/kind", "None"),
        (
            "kuberay/service.yaml", "RayService",
            "spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/port", 1,
        ),
    ],
)  # fmt: skip
def test_a_wrong_document_is_found(name: str, kind: str, path: str, wrong: Any) -> None:
    document = of_kind(name, kind)
    *parents, last = path.split("/")
    inner: Any = document
    for step in parents:
        inner = inner[int(step) if step.isdigit() else step]
    inner[last] = wrong
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_pods_have_an_account_without_rights_and_without_its_token() -> None:
    """Nothing here calls Kubernetes' API, so there is no Role."""
    accounts = [d for _, d in documents() if d["kind"] == "ServiceAccount"]
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    names = {account["metadata"]["name"] for account in accounts}
    pods = [t["spec"] for _, d in documents() for t in pod_templates(d)]
    assert len(pods) == 5
    for pod in pods:
        assert pod["serviceAccountName"] in names
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert not {"Role", "RoleBinding", "ClusterRole"} & {d["kind"] for _, d in documents()}


def test_the_fleet_on_ray_is_started_with_flags_that_there_are() -> None:
    spec = of_kind("kuberay/service.yaml", "RayService")["spec"]
    config, cluster = yaml.safe_load(spec["serveConfigV2"]), spec["rayClusterConfig"]
    [application] = config["applications"]
    module, name = application["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    args = make_parser().parse_known(["fleet", *application["args"]["fleet"], "--ray"])
    head, [engines] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    [container] = head["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (args.port, args.grpc_port, args.host) == (ports["http"], ports["grpc"], "0.0.0.0")
    assert config["http_options"]["port"] == ports["serve"]
    assert (engines["replicas"], engines["maxReplicas"]) == (args.replicas, args.max_replicas)
    [worker] = engines["template"]["spec"]["containers"]
    assert int(worker["resources"]["limits"]["cpu"]) == args.num_threads, "one engine for each"
    [wants] = [deployment["ray_actor_options"] for deployment in application["deployments"]]
    has = json.loads(json.loads(head["rayStartParams"]["resources"].strip("'")))
    assert wants["resources"] == has
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in constraints


def test_containers_are_started_with_flags_that_there_are() -> None:
    parser, found = make_parser(), 0
    for where, document in documents():
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        for container in document["spec"]["template"]["spec"]["containers"]:
            args = parser.parse_known(container["args"])
            assert args.host == "0.0.0.0", where
            spec = document["spec"]["template"]["spec"]
            pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            left = spec["terminationGracePeriodSeconds"] - pause - args.shutdown_timeout
            assert args.shutdown_timeout > 0, where
            assert left >= LAST_WORD + 5, "SIGKILL must not come before the service has ended"
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports == {"http": args.port, "grpc": args.grpc_port}
            found += 1
    assert found == 3


def test_engines_with_tls_and_their_front_are_started_with_flags_that_there_are() -> None:
    """What kustomize would make of the overlay, as far as arguments and the schema go."""
    parser = make_parser()
    overlay = yaml.safe_load((KUBERNETES / "fleet-tls" / "kustomization.yaml").read_text())
    engine, front = (yaml.safe_load(patch["patch"]) for patch in overlay["patches"])
    [container] = engine["spec"]["template"]["spec"]["containers"]
    args = parser.parse_known(container["args"])
    base = parser.parse_known(base_args("engine/engine.yaml"))
    assert (args.tls_cert, args.insecure, base.insecure) == ("/tls/tls.crt", False, True)
    assert args.shutdown_timeout == base.shutdown_timeout
    added = [each["value"] for each in front if each["path"].endswith("/args/-")]
    args = parser.parse_known([*base_args("fleet/front.yaml"), *added])
    assert (args.engine_tls_ca, len(args.engine)) == ("/engine-tls/ca.crt", 3)
    assert args.engine_tls_server_name == engine["metadata"]["name"]


def base_args(name: str) -> list[str]:
    documents = yaml.safe_load_all((KUBERNETES / name).read_text())
    [found] = [d for d in documents if d["kind"] == "StatefulSet"]
    args: list[str] = found["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_the_fronts_engines_are_those_of_the_set() -> None:
    patch = (KUBERNETES / "fleet" / "kustomization.yaml").read_text()
    count = int(re.search(r"path: /spec/replicas\n\s+value: (\d+)", patch)[1])
    front = (KUBERNETES / "fleet" / "front.yaml").read_text()
    names = re.findall(r"--engine=(\S+):50051", front)
    assert names == [f"rollout-engine-{n}.rollout-engine" for n in range(count)]


def build(folder: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("name", ["engine", "fleet", "fleet-tls", "kuberay", "monitoring"])
def test_kustomize_builds_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "k")
    for file in ("tls.crt", "tls.key"):  # whoever applies it brings them
        for folder in ("fleet", "fleet-tls", "kuberay"):
            (tmp_path / "k" / folder / file).write_text("a certificate")
    (tmp_path / "k" / "fleet-tls" / "ca.crt").write_text("an authority")
    found = build(tmp_path / "k" / name)
    for document in found:
        check(document)
    kinds = [document["kind"] for document in found]
    if name.startswith("fleet"):
        assert kinds.count("StatefulSet") == 2
        assert "PodDisruptionBudget" in kinds


def test_the_image_installs_what_it_copies() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            there = list(DEPLOY.parent.glob(name))
            assert there or name.endswith("*"), name


def with_component(folder: Path, base: str, component: str) -> list[dict[str, Any]]:
    """What an overlay of ``base`` with that component comes to."""
    shutil.copytree(KUBERNETES, folder / "k")
    for file in ("tls.crt", "tls.key", "ca.crt"):
        for of in ("fleet", "fleet-tls"):
            (folder / "k" / of / file).write_text("a certificate")
    overlay = {"resources": [f"../{base}"], "components": [f"../{component}"]}
    (folder / "k" / "overlay").mkdir()
    (folder / "k" / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    found = build(folder / "k" / "overlay")
    for document in found:
        check(document)
    return found


def engine_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod's spec."""
    names = {d["metadata"]["name"]: d for d in documents if d["kind"] == "StatefulSet"}
    spec: dict[str, Any] = names["rollout-engine"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_the_component_gives_engines_a_gpu(tmp_path: Path) -> None:
    [container] = engine_of(with_component(tmp_path, "engine", "gpu"))["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("base", ["engine", "fleet"])
def test_the_component_has_all_engines_read_a_model_that_none_writes(
    base: str, tmp_path: Path
) -> None:
    found = with_component(tmp_path, base, "model-volume")
    kinds = {d["kind"]: d for d in found if d["metadata"]["name"] == "rollout-models"}
    volume, claim = kinds["PersistentVolume"]["spec"], kinds["PersistentVolumeClaim"]["spec"]
    assert volume["accessModes"] == claim["accessModes"] == ["ReadOnlyMany"]
    assert claim["volumeName"] == "rollout-models"
    spec = engine_of(found)
    [mount] = [m for m in spec["containers"][0]["volumeMounts"] if m.get("readOnly")]
    [held] = [v for v in spec["volumes"] if v["name"] == mount["name"]]
    assert held["persistentVolumeClaim"] == {"claimName": "rollout-models", "readOnly": True}
    [settings] = [d["data"] for d in found if d["kind"] == "ConfigMap"]
    assert settings["MODEL"].startswith(f"{mount['mountPath']}/")
    assert len(spec["volumes"]) == 3, "those of the engine are still there"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("base", ["fleet", "fleet-tls"])
def test_the_component_adds_fronts_that_route_for_the_one_that_coordinates(
    base: str, tmp_path: Path
) -> None:
    found = with_component(tmp_path, base, "fleet-routers")
    [routers] = [d for d in found if d["kind"] == "Deployment"]
    services = {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "Service"}
    labels = routers["spec"]["template"]["metadata"]["labels"]
    assert services["rollout-routers"]["selector"] == labels
    assert services["rollout"]["selector"] == {"app": "rollout-front"}, "is the coordinator's"
    pod = routers["spec"]["template"]["spec"]
    [container] = pod["containers"]
    args = make_parser().parse_known(container["args"])
    ports = {each["name"]: each["port"] for each in services["rollout"]["ports"]}
    assert args.coordinator == f"rollout:{ports['grpc']}"
    assert args.coordinator_tls_ca == "/tls/tls.crt"
    [front] = [d for d in found if d["metadata"]["name"] == "rollout-front"]
    of_front = front["spec"]["template"]["spec"]
    assert pod["volumes"][0] == of_front["volumes"][0], "the certificate of the front"
    names = {each["name"]: each["valueFrom"] for each in container["env"]}
    assert names["ROLLOUT_COORDINATOR_TOKEN"] == names["ROLLOUT_TOKEN"]
    assert container["image"] == of_front["containers"][0]["image"]


def test_engines_are_spread_over_nodes_and_zones_where_that_can_be() -> None:
    template = of_kind("engine/engine.yaml", "StatefulSet")["spec"]["template"]
    spec, labels = template["spec"], template["metadata"]["labels"]
    [apart] = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    [zones] = spec["topologySpreadConstraints"]
    assert zones["whenUnsatisfiable"] == "ScheduleAnyway"
    for chosen in (apart["podAffinityTerm"], zones):
        assert chosen["labelSelector"]["matchLabels"] == labels

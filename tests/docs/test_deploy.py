"""What deploy/ holds is what Kubernetes' API takes, and starts `rollout` with flags that it has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollout.cli.main import make_parser
from rollout.cli.service import LAST_WORD

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
NOT_OF_THE_API = {"ServiceMonitor", "Kustomization"}


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.relative_to(DEPLOY)}:{document['kind']}", document)
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize(("where", "document"), documents(), ids=lambda value: str(value)[:60])
def test_every_document_has_the_apis_schema(where: str, document: dict[str, Any]) -> None:
    assert document["metadata" if "metadata" in document else "resources"], where
    if document["kind"] not in NOT_OF_THE_API:
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_a_wrong_document_is_found() -> None:
    document = next(d for where, d in documents() if where.endswith("engine.yaml:StatefulSet"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "spec": {"replica": 1}}, "1.34", strict=True)


def test_containers_are_started_with_flags_that_there_are() -> None:
    parser, found = make_parser(), 0
    for where, document in documents():
        if document["kind"] != "StatefulSet":
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
    assert found == 2


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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("name", ["engine", "fleet", "fleet-tls", "monitoring"])
def test_kustomize_builds_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "k")
    for file in ("tls.crt", "tls.key"):  # whoever applies it brings them
        for folder in ("fleet", "fleet-tls"):
            (tmp_path / "k" / folder / file).write_text("a certificate")
    (tmp_path / "k" / "fleet-tls" / "ca.crt").write_text("an authority")
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "k" / name)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    kinds = [document["kind"] for document in yaml.safe_load_all(built)]
    assert kinds
    if name.startswith("fleet"):
        assert kinds.count("StatefulSet") == 2
        assert "PodDisruptionBudget" in kinds


def test_the_image_installs_what_it_copies() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for name in line.split():
            there = list(DEPLOY.parent.glob(name))
            assert there or name.endswith("*"), name

"""A trainer that broadcasts as SGLang's do: a torch process group beside its default one."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx
import pytest
from forked import said_by
from free_ports import free_port
from safetensors.torch import load_file, save, save_file
from serving import serve
from tiny_heads import write_release
from tiny_models import write_tiny

from rollout import Rollout

TRAINER = Path(__file__).parent / "sglang_trainer.py"
pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def engine(folder, model):
    (folder / "weights").mkdir()
    flags = ["--dtype", "float32", "--tensor-parallel-size", "2"]
    flags += ["--weight-dir", str(folder / "weights")]
    with (
        serve(model, *flags) as served,
        httpx.Client(base_url=f"http://{served.http}", timeout=120) as http,
        Rollout.connect(served.grpc) as rollout,
    ):
        yield http, rollout, f"http://{served.http}"


def run_trainer(url: str, path: Path, *flags: str) -> str:
    """A process of its own, since its group lies beside its default group; what it printed."""
    ports = ",".join(str(free_port()) for _ in range(2))
    return said_by(TRAINER, [url, str(path), ports, *flags])


@pytest.mark.parametrize(
    "flags", [("--buckets", "3"), ("--flattened", "--session")], ids=["implicit", "session"]
)
def test_a_torch_trainer_broadcasts_and_its_weights_go_live(engine, folder, weights, flags) -> None:
    http, rollout, url = engine
    seed = 1 if "--buckets" in flags else 2
    path = folder / f"sent{seed}.safetensors"
    save_file(weights[seed], path)
    before = http.get("/weight_info").json()["version"]
    run_trainer(url, path, "--label", f"step-{seed}", *flags)
    assert http.get("/weight_info").json()["version"] == before + 1
    assert http.get("/get_weight_version").json() == {"weight_version": f"step-{seed}"}
    assert rollout.check_weights(weights[seed]).equal
    row = http.post("/generate", json={"input_ids": [5, 6]}).json()["meta_info"]
    assert row["weight_version"] == f"step-{seed}"


def test_a_label_that_comes_before_an_updates_end_is_that_of_its_version(
    engine, folder, weights
) -> None:
    """miles's order: begin, parts, ``/update_weight_version``, end."""
    http, rollout, url = engine
    http.post("/update_weight_version", json={"new_version": "before"})
    before = rollout.weight_info().version
    path = folder / "labelled.safetensors"
    save_file(weights[2], path)
    assert run_trainer(url, path, "--session", "--buckets", "2", "--late-label", "step-9") == ""
    labels = {receipt.version: receipt.label for receipt in rollout.receipts()}
    assert labels.get(before, "before") == "before"
    assert labels[before + 1] == "step-9"
    assert http.get("/get_weight_version").json() == {"weight_version": "step-9"}


def test_a_group_of_each_pipeline_stage_sends_its_part_of_one_update(
    engine, folder, weights
) -> None:
    """slime's calls (written down from its source): a group for each stage, whose buckets alternate
    behind a lock of its own, two updates over the same groups.
    """
    http, rollout, url = engine
    path = folder / "staged.safetensors"
    save_file(weights[1], path)
    before = http.get("/weight_info").json()["version"]
    flags = ("--stages", "2", "--buckets", "5", "--rounds", "2", "--label", "7")
    assert run_trainer(url, path, *flags) == ""
    assert http.get("/weight_info").json()["version"] == before + 2
    assert rollout.check_weights(weights[1]).equal
    body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "slime-pp_0"}
    reply = http.post("/update_weights_from_distributed", json=body)
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert "in no transfer group" in reply.json()["message"]


@pytest.mark.parametrize("flags", [("--draft-component", "mtp"), ()], ids=["drafts", "plain"])
def test_a_head_behind_the_policy_in_calls_of_its_own(folder, flags) -> None:
    """Each tensor in a call: the policy is complete before the head begins."""
    for seed, name in enumerate(("served", "trained")):
        write_release(folder / name, "qwen3_next", seed=seed)
    path = folder / "trained" / "model.safetensors"
    sent = load_file(path)
    assert [name.startswith("mtp.") for name in sent] == sorted(
        name.startswith("mtp.") for name in sent
    )
    flags = (*flags, "--num-speculative-tokens", "2") if flags else ()
    with (
        serve(folder / "served", "--dtype", "float32", *flags) as served,
        Rollout.connect(served.grpc) as rollout,
    ):
        url = f"http://{served.http}"
        told = run_trainer(url, path, "--buckets", str(len(sent)), "--rounds", "2", "--label", "7")
        assert told == ""
        info = rollout.weight_info()
        assert (info.version, info.label, info.state) == (4 if flags else 2, "7", "idle")
        assert rollout.check_weights(sent).equal


def test_a_model_that_is_not_whole_does_not_go_on(engine, folder, weights) -> None:
    http, _, url = engine
    path = folder / "part.safetensors"
    save_file(dict(list(weights[1].items())[:-1]), path)
    before = http.get("/weight_info").json()
    told = run_trainer(url, path, "--buckets", "2", "--part")
    last = list(weights[1])[-1]
    assert told.count("continue_generation 422") == 2
    assert last in told
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert http.post("/continue_generation", json={}).status_code == 200
    assert http.get("/weight_info").json() == before


def test_disk_and_safetensors_bodies_are_updates_too(engine, folder, weights) -> None:
    http, rollout, _ = engine
    step = folder / "weights" / "step"
    write_tiny(step, "qwen3", tied=True, seed=1)
    body = {"model_path": str(step), "abort_all_requests": True, "weight_version": "disk"}
    reply = http.post("/update_weights_from_disk", json=body)
    assert reply.json()["success"] is True, reply.text
    assert rollout.check_weights(weights[1]).equal
    text = base64.b64encode(save(weights[2])).decode()
    body = {"serialized_named_tensors": [text], "load_format": "safetensors"}
    assert http.post("/update_weights_from_tensor", json=body).status_code == 200
    assert rollout.check_weights(weights[2]).equal
    first, second = (http.post("/weights_checker", json={}).json() for _ in range(2))
    assert first["per_engine_checksum"] == second["per_engine_checksum"]
    assert set(first["ranks"][0]["checksums"]) >= {"model.norm.weight"}


def test_tokens_of_an_older_version_have_the_label_that_it_had(engine, weights) -> None:
    http, rollout, _ = engine

    def put(seed: int, label: str) -> None:
        text = base64.b64encode(save(weights[seed])).decode()
        body = {"serialized_named_tensors": [text], "load_format": "safetensors"}
        body |= {"weight_version": label, "flush_cache": False}
        assert http.post("/update_weights_from_tensor", json=body).status_code == 200

    put(1, "step-6")
    relabelled = {"new_version": "step-7", "abort_all_requests": False}
    assert http.post("/update_weight_version", json=relabelled).status_code == 200
    body = {"input_ids": [5, 6, 7], "stream": True,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}  # fmt: skip
    with http.stream("POST", "/generate", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        put(2, "step-8")
        assert http.post("/continue_generation", json={}).status_code == 200
        spans = json.loads(list(lines)[-1][6:])["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["step-7", "step-8"]
    assert rollout.receipts()[-2].label == "step-7"

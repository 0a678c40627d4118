"""Transports and encodings between processes: a service of two ranks, trainers that get killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import serve
from tiny_models import write_tiny
from trainer import nudged

from rollout import Rollout
from rollout.weight_sync.transports.host import SHARED_MEMORY

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def model(directory):
    return write_tiny(directory, seed=3)


@pytest.fixture(scope="module")
def service(directory, model):
    flags = ("--tensor-parallel-size", "2", "--dtype", "float32", "--num-kv-blocks", "64")
    with serve(directory, *flags, "--max-model-len", "128") as served:
        yield served


@pytest.fixture
def client(service):
    with Rollout.connect(service.grpc, timeout=20) as rollout:
        yield rollout


def left(pid: int) -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob(f"rollout-ipc-{pid}-*")}


def test_auto_is_shared_memory_on_one_host_and_the_receipt_says_why(client, model) -> None:
    receipt = client.update_weights(model, bucket_bytes=64 << 10)
    assert receipt.transport == "ipc"
    assert receipt.details["transport_reason"].startswith("same host")
    assert client.check_weights(model).equal
    assert not left(os.getpid())


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "inline", "grpc_stream"])
def test_changes_alone_travel_and_are_live_and_proven(client, model, transport) -> None:
    weights = dict(model.state_dict())
    full = client.update_weights(weights, transport=transport, encoding="delta")
    weights = nudged(weights, 0.01)
    receipt = client.update_weights(weights, transport=transport, encoding="delta")
    assert (receipt.details["encoding"], receipt.transport) == ("delta", transport)
    assert receipt.wire_bytes <= 0.04 * full.wire_bytes
    assert client.check_weights(weights).equal


def test_a_service_follows_the_checkpoints_of_a_trainer(directory, model, tmp_path) -> None:
    flags = ("--weight-dir", str(tmp_path), "--follow", str(tmp_path), "--num-kv-blocks", "64")
    with (
        serve(directory, *flags, "--max-model-len", "128") as served,
        Rollout.connect(served.grpc, timeout=20) as rollout,
    ):
        weights = nudged(model.state_dict(), 0.5)
        for step in (10, 20):
            weights = nudged(weights, 0.5, step)
            model.save_pretrained(tmp_path / f"checkpoint-{step}", state_dict=dict(weights))
            deadline = time.monotonic() + 20
            while rollout.weight_info().version != step:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert rollout.weight_info().label == f"checkpoint-{step}"
            assert rollout.check_weights(weights).equal


def test_following_a_directory_that_was_not_allowed_is_refused(directory, tmp_path) -> None:
    command = [sys.executable, "-m", "rollout", "serve", str(directory), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--follow", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "is outside every --weight-dir; allow it with --weight-dir" in done.stderr


KILLED = """
import itertools, sys, time
import torch
from rollout import Rollout

def endless():
    for name, tensor in items:
        yield name, tensor
        print("sent", flush=True)
        time.sleep(0.05)

with Rollout.connect(sys.argv[1], timeout=20) as rollout:
    items = [(m.name, torch.zeros(m.shape)) for m in rollout.weight_info().tensors]
    rollout.update_weights(endless(), transport=sys.argv[2], bucket_bytes=8192)
"""


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_a_trainer_killed_midway_leaves_the_version_and_no_memory(
    client, model, service, transport
) -> None:
    client.update_weights(model)
    version = client.weight_version
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, service.grpc, transport],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    with process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "sent\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while client.weight_info().state != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not left(process.pid)
    assert client.weight_version == version
    told = client.metrics().weight_update_errors[-1]
    assert "the trainer went away, or closed its channel, while its tensors came in, after" in told
    assert told.endswith(f"version {version} serves on")
    assert client.check_weights(model).equal
    assert client.update_weights(model, transport=transport).version == version + 1

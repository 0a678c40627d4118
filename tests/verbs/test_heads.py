"""A trainer that broadcasts a release's head among the policy's tensors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file
from sender import Sender
from serving import serve
from tiny_heads import write_release

from rollout import Rollout
from rollout.models.config.model import ModelConfig


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_head_that_is_broadcast_with_its_policy_changes_with_it(
    tmp_path: Path, replicas: int
) -> None:
    for seed, name in enumerate("ab"):
        write_release(tmp_path / name, "glm4_moe", seed=seed)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    further = ModelConfig.from_directory(tmp_path / "a").further_prefixes
    policy = {name: tensor for name, tensor in new.items() if not name.startswith(further)}
    flags = ("--dtype", "float32", "--draft-component", "mtp", "--num-speculative-tokens", "2")
    with (
        serve(tmp_path / "a", *flags, "--replicas", str(replicas)) as served,
        httpx.Client(base_url=f"http://{served.http}", timeout=180) as http,
        Rollout.connect(served.grpc) as rollout,
    ):
        sender = Sender(http, 1)
        sender.init()
        for sent, head in ((policy, old), (new, new)):
            sender.post("start_weight_update", {})
            assert sender.update(sent.items()).status_code == 200
            reply = sender.post("finish_weight_update", {})
            assert reply.status_code == 200, reply.text
            assert rollout.check_weights({"policy": new, "mtp": head}).equal
        short = dict(new)
        short.pop(max(name for name in new if name.startswith(further)))
        sender.post("start_weight_update", {})
        sender.update(short.items())
        reply = sender.post("finish_weight_update", {})
        assert "mtp:model.layers.2" in reply.text
        assert rollout.check_weights({"policy": new, "mtp": new}).equal
        sender.close()

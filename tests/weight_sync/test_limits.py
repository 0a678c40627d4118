"""Stall and memory as a contract: an update that would break it moves nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import write_tiny

from rollout import Rollout
from rollout.engine.updates.limits import UpdateLimits
from rollout.errors import ConfigError, LimitExceeded
from rollout.weight_sync.protocol.messages import UpdateRequest

TIMEOUT = 20.0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("limits") / "tiny"
    model = write_tiny(directory, "qwen3", seed=3)
    with (
        Rollout(directory, device="cpu", skip_tokenizer_init=True, num_threads=1) as engine,
        Rollout.connect(engine.address) as client,
    ):
        yield engine, client, dict(model.state_dict())


def _nudged(weights: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: value + by for name, value in weights.items()}


def test_a_plan_that_breaks_a_limit_is_refused_and_names_the_need_and_the_remedy(served):
    engine, client, weights = served
    size = sum(value.nbytes for value in weights.values())
    before = engine.weight_info()
    with pytest.raises(LimitExceeded, match=r"max_extra_memory.*staging='none' stalls") as refused:
        engine.update_weights(weights, max_extra_memory=size // 2, bucket_bytes=1 << 16)
    assert f"takes {size + 2 * (1 << 16)} bytes more" in str(refused.value)
    with pytest.raises(LimitExceeded, match=r"max_stall.*no other way of staging does"):
        client.update_weights(weights, max_stall=1e-9, timeout=TIMEOUT)
    with pytest.raises(LimitExceeded, match=r"staging='none'.*staging='device' stalls"):
        client.update_weights(weights, max_stall=0.015, staging="none", timeout=TIMEOUT)
    after = engine.weight_info()
    assert (after.version, after.state) == (before.version, "idle")
    assert engine.check_weights(weights).equal, "something moved"
    with pytest.raises(ConfigError, match="max_stall"):
        engine.update_weights(weights, max_stall=-1)
    for version in ("7", 2.5, True, -1):
        with pytest.raises(ConfigError, match="version must be an integer of at least 0"):
            client.update_weights(weights, version=version)


def test_what_is_kept_is_told_and_later_estimates_are_measured(served):
    engine, client, weights = served
    size = sum(value.nbytes for value in weights.values())
    allowed = {"max_stall": 5.0, "max_extra_memory": size + (2 << 16)}
    first = client.update_weights(
        _nudged(weights, 0.125), timeout=TIMEOUT, bucket_bytes=1 << 16, **allowed
    )
    assert first.details["max_stall"].startswith(f"kept: {first.timings['stall']:.6f} s of 5 s")
    assert size <= int(first.details["extra_memory_bytes"]) <= size + (1 << 16)
    second = client.update_weights(  # the shadow is there: buckets alone are new
        _nudged(weights, 0.25),
        timeout=TIMEOUT,
        bucket_bytes=1 << 16,
        max_stall=5.0,
        max_extra_memory=2 << 16,
    )
    assert second.details["foreseen_basis"].startswith("the median of the last 1 commits")
    assert float(second.details["foreseen_stall"]) == pytest.approx(
        first.timings["stall"], abs=1e-6
    )
    assert int(second.details["extra_memory_bytes"]) <= 1 << 16
    plain = engine.update_weights(_nudged(weights, 0.5))
    assert "max_stall" not in plain.details


def test_a_directory_that_the_server_reads_keeps_the_limits_too(tmp_path):
    directory = tmp_path / "tiny"
    write_tiny(directory, "qwen3", seed=4)
    with Rollout(
        directory, device="cpu", skip_tokenizer_init=True, weight_dirs=(str(tmp_path),)
    ) as engine:
        with Rollout.connect(engine.address) as client, pytest.raises(LimitExceeded):
            client.update_weights(server_path=directory, max_extra_memory=10, timeout=TIMEOUT)
        assert engine.weight_version == 0


def test_what_a_small_update_takes_is_not_for_its_bytes():
    """A few KiB in 20 ms say nothing of how long 16 GiB take."""
    limits, size = UpdateLimits(), 16 << 30
    request = UpdateRequest(
        update_id="u", bucket_bytes=1 << 20, timeout=5.0, staging="none", max_stall=3600.0
    )
    plans = [{"none": {"extra": 0, "moved": 0}}]
    limits.measured("held", 0.02, 4096)
    small = SimpleNamespace(
        num_bytes=1 << 20, wire_bytes=1 << 20, adapters={}, timings={"total": 0.05}, version=1
    )
    assert limits.check(request, plans, [small], size).basis.endswith("at this host's speed")
    limits.measured("held", 4.0, size // 2)
    assert limits.check(request, plans, [small], size).stall == 8.0

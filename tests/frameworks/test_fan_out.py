"""One stream of tensors for several engines: all commit, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny

from rollout import Rollout
from rollout.errors import SourceFailed, WeightMismatch
from rollout.integrations.fan_out import FanOut

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "max_model_len": 128}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    where = tmp_path_factory.mktemp("fan_out")
    write_tiny(where / "whole", "qwen3")
    with (
        Rollout(str(where / "whole"), **ENGINE) as one,
        Rollout(str(where / "whole"), **ENGINE) as two,
        Rollout(str(where / "whole"), check_finite=False, **ENGINE) as lenient,
    ):
        yield one, two, lenient


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict:
    where: Path = tmp_path_factory.mktemp("weights")
    return dict(write_tiny(where, "qwen3", seed=1).state_dict())


def test_every_engine_gets_the_same_version_from_one_stream(engines, weights) -> None:
    one, two, _ = engines
    read = []

    def items():
        for name, tensor in weights.items():
            read.append(name)
            yield name, tensor

    fan_out = FanOut({one.address: None, two.address: None}, bucket_bytes=32 << 10, timeout=20)
    try:
        before = [one.weight_version, two.weight_version]
        receipts = fan_out.update(items())
        assert read == list(weights)
        assert [receipt.version for receipt in receipts] == [v + 1 for v in before]
        assert len({receipt.digest for receipt in receipts}) == 1
        assert one.check_weights(weights).equal
        assert two.check_weights(weights).equal
    finally:
        fan_out.close()


def test_where_one_engine_refuses_none_commits_and_its_reason_is_told(engines, weights) -> None:
    one, _, lenient = engines
    both = {one.address: None, lenient.address: None}
    fan_out = FanOut(both, bucket_bytes=32 << 10, timeout=20)
    try:
        before = one.weight_version
        with pytest.raises(WeightMismatch, match="nonsense"):
            fan_out.update(iter([*weights.items(), ("model.nonsense", weights["lm_head.weight"])]))
        # One votes yes on these, the other no: neither commits.
        broken = {**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")}
        with pytest.raises(WeightMismatch, match="NaN"):
            fan_out.update(iter(broken.items()))
        assert (one.weight_version, lenient.weight_version) == (before, 0)
        assert "no engine commits: 1 tensors hold NaN" in lenient.metrics().weight_update_errors[-1]
    finally:
        fan_out.close()


def test_a_source_that_fails_leaves_every_engine_as_it_was(engines, weights) -> None:
    one, two, _ = engines

    def failing():
        yield from list(weights.items())[:5]
        raise OSError("the trainer's disk is full")

    fan_out = FanOut({one.address: None, two.address: None}, bucket_bytes=32 << 10, timeout=20)
    try:
        before = [one.weight_version, two.weight_version]
        with pytest.raises(SourceFailed, match="disk is full"):
            fan_out.update(failing())
        assert [one.weight_version, two.weight_version] == before
        assert fan_out.update(iter(weights.items()))[0].version == before[0] + 1
    finally:
        fan_out.close()

"""Weights that hold NaN or infinity are found: an update is refused by name, a start warns."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout import Rollout, SamplingParams
from rollout.errors import WeightMismatch

NORM, HEAD = "model.norm.weight", "lm_head.weight"
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SETTINGS = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}


@pytest.fixture(scope="module")
def spoilt(other_weights: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in other_weights.items()}
    state[NORM][3:6] = float("nan")
    state[HEAD][7, 7] = float("inf")
    return state


@pytest.mark.parametrize("transport", ["inline", "grpc_stream", "broadcast", "ipc", "p2p"])
def test_an_update_is_refused_and_the_old_version_serves_on(
    client: Any, spoilt: dict[str, Tensor], transport: str
) -> None:
    live, before = client.weight_version, client.metrics()
    tokens = client.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(WeightMismatch, match=r"2 tensors hold NaN or infinity") as caught:
        client.update_weights(spoilt, transport=transport, timeout=20)
    assert f"{NORM} (3 elements)" in str(caught.value)
    assert f"{HEAD} (1 elements)" in str(caught.value)
    assert client.weight_version == live
    assert client.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids == tokens
    after = client.metrics()
    grown = after.weight_updates_nonfinite_total - before.weight_updates_nonfinite_total
    assert grown == 1


def test_a_value_out_of_the_engines_range_is_found_after_the_cast(
    client: Any, other_weights: dict[str, Tensor]
) -> None:
    """1e39 is a number in float64 and infinite in the engine's float32."""
    state = {**other_weights, NORM: other_weights[NORM].double()}
    state[NORM][0] = 1e39
    with pytest.raises(WeightMismatch, match=rf"{NORM} \(1 elements\)"):
        client.update_weights(state, timeout=20)


@pytest.fixture(scope="module")
def bad_checkpoint(bare_checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("bad")
    shutil.copytree(bare_checkpoint, where, dirs_exist_ok=True)
    state = load_file(where / "model.safetensors")
    state[NORM][0] = float("nan")
    save_file(state, where / "model.safetensors")
    return where


def test_a_start_from_such_a_checkpoint_warns_and_an_update_mends_it(
    bad_checkpoint: Path, other_weights: dict[str, Tensor], caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING), Rollout(str(bad_checkpoint), **SETTINGS) as rollout:
        assert f"NaN or infinity in {NORM}:" in caplog.text
        assert rollout.metrics().nonfinite_tensors == 1
        rollout.update_weights(other_weights, timeout=20)
        assert rollout.metrics().nonfinite_tensors == 0


def test_an_engine_that_does_not_look_takes_them(
    bad_checkpoint: Path, spoilt: dict[str, Tensor], caplog: Any
) -> None:
    settings = {**SETTINGS, "check_finite": False}
    with caplog.at_level(logging.WARNING), Rollout(str(bad_checkpoint), **settings) as rollout:
        assert "NaN" not in caplog.text
        rollout.update_weights(spoilt, timeout=20)
        assert rollout.check_weights(spoilt).equal
        assert rollout.weight_version == 1
    assert not torch.isfinite(spoilt[NORM]).all()

"""Adapters merged into what is live: answered by what is live now, and read where it is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout import Rollout
from rollout.errors import ConfigError, EngineBroken, VersionConflict

Q = "model.layers.0.self_attn.q_proj.weight"


class _AnotherCommitsFirst:
    """The way to an engine, on which somebody's full update commits before ours begins."""

    def __init__(self, rollout: Rollout, weights: Any) -> None:
        self._rollout, self._weights = rollout, weights

    def open(self) -> Any:
        self._rollout.update_weights(self._weights)
        return self._rollout._async.backend.link.open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout._async.backend.link, name)


@pytest.fixture(scope="module")
def weights(other_weights) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in other_weights.items() if name != "lm_head"}


@pytest.fixture
def rollout(bare_checkpoint, tmp_path):
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 16}
    with Rollout(bare_checkpoint, weight_dirs=[str(tmp_path)], **settings) as made:
        yield made


def write(rollout: Rollout, path: Path, seed: int, **settings: Any) -> str:
    shape = next(t.shape for t in rollout.weight_info().tensors if t.name == Q)
    torch.manual_seed(seed)
    stem = f"base_model.model.{Q.removesuffix('.weight')}"
    factors = {"A": torch.randn(2, shape[1]), "B": torch.randn(shape[0], 2)}
    path.mkdir(exist_ok=True)
    save_file(
        {f"{stem}.lora_{name}.weight": factor for name, factor in factors.items()},
        path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def load_for_a_client(rollout: Rollout, path: str) -> None:
    """As HTTP's routes do."""
    rollout._async.backend.load_lora_adapter("a", path, anywhere=False)


def load(rollout: Rollout, path: str, **more: Any) -> int | None:
    backend = rollout._async.backend
    receipt = backend.adapters.load("a", Path(path), backend.link, **more)
    return None if receipt is None else receipt.version


def test_a_name_is_merged_again_when_its_files_or_the_live_weights_are_others(
    rollout, tmp_path, weights, bare_checkpoint
) -> None:
    backend = rollout._async.backend
    path = write(rollout, tmp_path / "a", 1)
    assert (load(rollout, path), load(rollout, path)) == (1, None)
    first = backend.digests(10)
    write(rollout, tmp_path / "a", 2)
    assert load(rollout, path) == 2
    assert backend.digests(10) != first
    second = backend.digests(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of the caller's: it rounds no merge
        assert (load(rollout, path, inplace=True), load(rollout, path)) == (3, None)
    assert backend.digests(10) == second
    assert backend.adapters.unload("a", backend.link)
    assert rollout.check_weights(bare_checkpoint).equal
    # A full update that commits before the adapter does is not merged with it.
    with pytest.raises(VersionConflict):
        backend.adapters.load("a", Path(path), _AnotherCommitsFirst(rollout, weights))
    assert rollout.check_weights(weights).equal
    assert backend.adapters.names == ()


def test_an_adapter_whose_place_others_have_taken_is_not_said_to_be_live(
    rollout, tmp_path, weights
) -> None:
    backend = rollout._async.backend
    path = write(rollout, tmp_path / "a", 1)
    assert load(rollout, path) == 1
    rollout.update_weights(weights)
    with pytest.raises(VersionConflict, match="make the checkpoint live again, by a full update"):
        load(rollout, path)
    assert backend.adapters.unload("a", backend.link)
    assert rollout.weight_version == 2  # those that were live stay so
    assert rollout.check_weights(weights).equal


def test_after_a_rollback_and_after_an_update_with_the_checkpoint_an_adapter_is_merged(
    rollout, tmp_path, weights, bare_checkpoint
) -> None:
    first, second = (write(rollout, tmp_path / name, n) for n, name in enumerate("ab"))
    assert load(rollout, first) == 1
    digests = rollout._async.backend.digests(10)
    assert load(rollout, second) == 2
    rollout.rollback()  # what is live is the checkpoint with the first one
    assert rollout._async.backend.digests(10) == digests
    assert load(rollout, second) == 4
    assert load(rollout, first) == 5
    assert rollout._async.backend.digests(10) == digests
    rollout.update_weights(weights)
    rollout.update_weights(bare_checkpoint)
    assert load(rollout, first) == 8
    assert rollout._async.backend.digests(10) == digests


def test_an_adapter_that_a_rollback_brought_back_leaves_the_weights_as_its_name_goes(
    rollout, tmp_path, bare_checkpoint
) -> None:
    backend = rollout._async.backend
    for n, name in enumerate("ab"):
        rollout.load_lora_adapter(name, write(rollout, tmp_path / name, n))
    rollout.rollback()  # what is live is the checkpoint with a
    digests = backend.digests(10)
    assert rollout.unload_lora_adapter("b")
    assert (rollout.weight_version, backend.digests(10)) == (3, digests)
    assert rollout.unload_lora_adapter("a")
    assert rollout.check_weights(bare_checkpoint).equal
    # b is loaded again, and not taken for what was live before.
    assert rollout.load_lora_adapter("b", str(tmp_path / "b")).version == 5
    assert not rollout.check_weights(bare_checkpoint).equal


def test_the_checkpoint_is_known_again_by_a_service_that_has_merged_nothing_yet(
    rollout, tmp_path, weights, bare_checkpoint
) -> None:
    path = write(rollout, tmp_path / "a", 1)
    rollout.update_weights(weights)
    rollout.update_weights(bare_checkpoint)
    assert load(rollout, path) == 3


def test_after_a_sleep_that_drops_the_weights_no_adapter_is_live(rollout, tmp_path) -> None:
    path = write(rollout, tmp_path / "a", 1)
    assert load(rollout, path) == 1
    rollout.sleep(level=2)
    rollout.wake_up()
    with pytest.raises(EngineBroken):
        load(rollout, path)
    assert rollout._async.backend.adapters.unload("a", rollout._async.backend.link)


def test_what_is_no_plain_adapter_or_lies_elsewhere_is_refused(
    rollout, tmp_path, tmp_path_factory
) -> None:
    refused: dict[str, Any] = {
        "init_lora_weights": "pissa_niter_4",
        "layer_replication": [[0, 1], [0, 1]],
        "alora_invocation_tokens": [1],
        "use_qalora": True,
        "kasa_config": {},
    }
    for name, value in refused.items():
        path = write(rollout, tmp_path / name, 1, **{name: value})
        with pytest.raises(ConfigError, match=f"{name}=.*not merged here"):
            load(rollout, path)
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.safetensors"
    path = write(rollout, tmp_path / "linked", 1)
    linked = tmp_path / "linked" / "adapter_model.safetensors"
    linked.rename(secret)
    linked.symlink_to(secret)
    with pytest.raises(ConfigError, match="outside every --weight-dir; not read"):
        load_for_a_client(rollout, path)
    with pytest.raises(ConfigError, match="outside every --weight-dir; allow it"):
        load_for_a_client(rollout, str(secret.parent))
    with pytest.raises(ConfigError, match=r"not a directory; .*adapter_model\.safetensors"):
        load_for_a_client(rollout, str(tmp_path / "missing"))
    assert rollout.weight_version == 0


def test_the_process_of_the_engine_may_name_any_directory(rollout, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with pytest.raises(ConfigError, match=r"not a directory; .*adapter_config\.json"):
        rollout.load_lora_adapter("a", elsewhere / "missing")
    loaded = rollout.load_lora_adapter("a", write(rollout, elsewhere / "a", 1))
    assert (loaded.version, loaded.merged) == (1, True)

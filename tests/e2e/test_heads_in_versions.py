"""Versions on disk that were written with a release's head among the policy's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted
from safetensors.torch import load_file
from start_engines import outcome, start
from tiny_heads import write_release
from torch import Tensor

from rollout import Rollout
from rollout.errors import ChecksumMismatch, SourceFailed, WeightMismatch
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.versions.follower import Follower
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter

Weights = dict[str, Tensor]
SPECULATES = {"draft_component": "mtp", "num_speculative_tokens": 2}
ENGINES = {
    "drafts by it": SPECULATES,
    "holds it": {"components": "mtp"},
    "has none": {},
    "staged in host memory": {**SPECULATES, "staging": "host"},
    "without staging": {**SPECULATES, "staging": "none", "undo": "host"},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """An engine, whether its head comes with the policy, and a trainer's versions beside it."""

    engine: Rollout
    routes: bool
    old: Weights
    new: Weights
    further: tuple[str, ...]
    where: Path

    def policy(self, weights: Weights) -> Weights:
        return {name: t for name, t in weights.items() if not name.startswith(self.further)}

    def live(self, weights: Weights) -> bool:
        """Whether they are, and their head where it came; else the one of the start."""
        sent = {"policy": self.policy(weights)}
        if "mtp" in self.engine.weight_info().components:
            sent["mtp"] = weights if self.routes else self.old
        return self.engine.check_weights(sent).equal

    def follower(self) -> Follower:
        backend = self.engine._async.backend
        return Follower(self.where, [self.where], lambda: backend.link, timeout=20.0)

    def writer(self, **options: Any) -> VersionWriter:
        return VersionWriter(LocalStore(self.where), dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("releases")
    for seed, name in enumerate("ab"):
        write_release(where / name, "qwen3_next", seed=seed)
    return where / "a", where / "b"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: Any, releases: tuple[Path, Path], tmp_path_factory: Any) -> Iterator[Any]:
    settings = dict(ENGINES[request.param])
    if "components" in settings:
        settings["components"] = {"mtp": str(releases[0])}
    roots = [str(tmp_path_factory.getbasetemp())]
    with start(releases[0], 1, weight_dirs=roots, max_adapters=1, **settings) as started:
        yield started, "draft_component" in settings


@pytest.fixture
def run(engine: Any, releases: tuple[Path, Path], tmp_path: Path) -> Run:
    old, new = (load_file(path / "model.safetensors") for path in releases)
    further = ModelConfig.from_directory(releases[0]).further_prefixes
    started, routes = engine
    components = started.weight_info().components
    policy = {name: t for name, t in old.items() if not name.startswith(further)}
    started.update_weights({"policy": policy, **({"mtp": old} if "mtp" in components else {})})
    return Run(engine=started, routes=routes, old=old, new=new, further=further, where=tmp_path)


def test_a_chain_of_versions_goes_live_as_its_tensors_would(run: Run) -> None:
    engine, write = run.engine, run.writer(encoding="delta", anchor_every=3).write
    first = engine.weight_version + 1
    history = [{name: t + 0.25 * step for name, t in run.new.items()} for step in range(4)]
    follower = run.follower()
    for step, tensors in enumerate(history):
        version = first + step
        manifest = write(tensors, version)
        assert manifest is not None
        assert (manifest.base is None) == (step in (0, 3))
        receipt = follower.look()
        assert receipt is not None
        assert (receipt.version, receipt.label) == (version, f"{version:012d}")
        assert ("mtp" in receipt.components) == run.routes
        assert run.live(tensors)
    assert follower.look() is None
    receipt = engine.update_weights(server_path=run.where / f"{first + 2:012d}")
    assert ("mtp" in receipt.components) == run.routes
    assert run.live(history[2])


def test_without_a_head_in_it_the_head_stays(run: Run) -> None:
    version = run.engine.weight_version + 1
    run.writer().write(run.policy(run.new), version)
    receipt = run.follower().look()
    assert receipt is not None
    assert "mtp" not in receipt.components
    sent = {"policy": run.policy(run.new)}
    if "mtp" in run.engine.weight_info().components:
        sent["mtp"] = run.old
    assert run.engine.check_weights(sent).equal


def test_what_is_wrong_with_a_head_in_a_version_changes_nothing(run: Run) -> None:
    engine, started = run.engine, outcome(run.engine)
    version = engine.weight_version
    name = min(name for name in run.new if name.startswith(run.further))
    run.writer().write({n: t for n, t in run.new.items() if n != name}, version + 1)
    follower = run.follower()
    if run.routes:
        with pytest.raises(WeightMismatch, match=f"mtp:{name} is missing"):
            follower.look()
        assert follower.look() is None  # its files are as they were
        assert engine.weight_version == version
        assert run.live(run.old)
        assert outcome(engine) == started
    else:
        assert follower.look() is not None
        assert run.live(run.new)


def test_damage_to_a_head_alone_is_found(run: Run) -> None:
    engine, started = run.engine, outcome(run.engine)
    version = engine.weight_version
    heads = {n: t for n, t in run.new.items() if n.startswith(run.further)}
    run.writer().write({**run.policy(run.new), **heads}, version + 1)
    last = max((run.where / f"{version + 1:012d}").glob("bucket-*"))
    data = bytearray(last.read_bytes())
    data[-64] ^= 0x55
    last.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="of version"):
        run.follower().look()
    assert engine.weight_version == version
    assert run.live(run.old)
    assert outcome(engine) == started


def test_a_version_of_a_head_alone_is_told_where_it_goes(run: Run) -> None:
    heads = {n: t for n, t in run.new.items() if n.startswith(run.further)}
    run.writer().write(heads, run.engine.weight_version + 1)
    error, words = (WeightMismatch, "is missing") if run.routes else (SourceFailed, "passes over")
    with pytest.raises(error, match=words):
        run.follower().look()
    assert run.live(run.old)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_an_adapter_stays_beside_it(run: Run, releases: tuple[Path, Path]) -> None:
    math = adapted(releases[1], 8, target_modules=["o_proj"])
    run.engine.update_weights(adapters={"math": math})
    run.writer().write(run.new, run.engine.weight_version + 1)
    assert run.follower().look() is not None
    assert run.live(run.new)
    assert set(run.engine.weight_info().adapters) == {"math"}

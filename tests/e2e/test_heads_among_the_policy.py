"""A trainer's stream that has a release's head among the policy's tensors: both change at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted
from frameworks.megatron_layouts import tree
from safetensors.torch import load_file
from start_engines import outcome, start
from tiny_heads import write_release
from tiny_models import write_tiny
from torch import Tensor

from rollout import Rollout
from rollout.errors import WeightMismatch
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.versions.reader import VersionSource, complete_versions
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights import Box, TensorMeta

Weights = dict[str, Tensor]


class Source:
    """A trainer's own ``WeightSource``, by names of files; its ranks read their boxes."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.agreement = weights, Agreement()

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self.weights.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(meta.name, [Box.full(meta.shape)]) for meta in self.metadata()]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        return [(Box.full(tuple(self.weights[name].shape)), self.weights[name])]


class Stream(Source):
    """One that knows what it has only as it comes."""

    def metadata(self) -> None:  # type: ignore[override]
        return None

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return []


def version_of(weights: Weights, path: Path) -> VersionSource:
    store = LocalStore(path.parent / "versions")
    version = max(complete_versions(store), default=0) + 1
    VersionWriter(store, dtype=torch.float32).write(weights, version)
    return VersionSource(store, version)


SPECULATES = {"draft_component": "mtp", "num_speculative_tokens": 2}
# Kinds of what a trainer passes.
SENT: dict[str, Callable[[Weights, Path], Any]] = {
    "dict": lambda weights, path: weights,
    "module": lambda weights, path: tree(weights),
    "generator": lambda weights, path: iter(weights.items()),
    "directory": lambda weights, path: str(path),
    "source": lambda weights, path: Source(weights),
    "stream": lambda weights, path: Stream(weights),
    "version": version_of,
    "policy of components": lambda weights, path: {"policy": iter(weights.items())},
}
BOXES = ("dict", "module", "source")
# Boxes go straight from rank to rank where it is known what there is.
WAYS = [*product(SENT, ["inline", "ipc", "broadcast"]), *product(BOXES, ["p2p"])]


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine that drafts by its head, and two releases' files; the first is live."""

    engine: Rollout
    paths: tuple[Path, Path]
    draft: Path

    @property
    def weights(self) -> tuple[Weights, Weights]:
        one, other = (load_file(path / "model.safetensors") for path in self.paths)
        return one, other

    def is_head(self, name: str) -> bool:
        return name.startswith(ModelConfig.from_directory(self.paths[0]).further_prefixes)

    def part(self, weights: Weights, head: bool) -> Weights:
        return {name: t for name, t in weights.items() if self.is_head(name) == head}

    def live(self, policy: Weights, head: Weights) -> bool:
        """Whether these are, each by itself."""
        return self.engine.check_weights({"policy": policy, "mtp": head}).equal


@pytest.fixture(scope="module", params=["glm4_moe", "qwen3_next", "qwen3_5_moe"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("heads")
    for seed, name in enumerate("ab"):
        write_release(where / name, request.param, seed=seed)
    write_tiny(where / "draft", "llama", num_layers=1)
    settings = SPECULATES | {"components": {"draft": str(where / "draft")}, "max_adapters": 2}
    with start(where / "a", 2, **settings) as engine:
        yield Served(engine=engine, paths=(where / "a", where / "b"), draft=where / "draft")


@pytest.fixture(autouse=True)
def of_the_first(served: Served) -> None:
    old, _ = served.weights
    served.engine.update_weights({"policy": old, "mtp": old})


@pytest.mark.parametrize(("kind", "transport"), WAYS)
def test_a_head_among_the_policys_tensors_changes_with_it(
    served: Served, kind: str, transport: str
) -> None:
    engine, (old, new) = served.engine, served.weights
    assert served.live(old, old)
    started = outcome(engine)

    def sent() -> Any:
        return SENT[kind](new, served.paths[1])

    receipt = engine.update_weights(sent(), transport=transport, timeout=20.0)
    assert receipt.details["transport_reason"]
    assert set(receipt.components) == {"policy", "mtp"}
    assert served.live(new, new)
    assert not served.live(new, old)
    assert engine.check_weights(sent()).equal
    if kind == "dict":
        engine.rollback()
        assert served.live(old, old)
        assert outcome(engine) == started


@pytest.mark.parametrize(
    "kind", ["dict", "module", "generator", "source", "stream", "version", "policy of components"]
)
def test_without_one_the_head_stays(served: Served, kind: str) -> None:
    engine, (old, new) = served.engine, served.weights
    policy = served.part(new, head=False)
    receipt = engine.update_weights(SENT[kind](policy, served.paths[1]))
    assert set(receipt.components) == {"policy"}
    assert served.live(new, old)
    assert engine.check_weights(SENT[kind](policy, served.paths[1])).equal


@pytest.mark.parametrize("kind", ["dict", "generator", "stream", "version", "policy of components"])
def test_a_part_of_a_head_changes_nothing(served: Served, kind: str) -> None:
    engine, (old, new) = served.engine, served.weights
    name = min(served.part(new, head=True))
    short = {n: t for n, t in new.items() if n != name}
    started, version = outcome(engine), engine.weight_version
    with pytest.raises(WeightMismatch, match=f"mtp:{name}"):
        engine.update_weights(SENT[kind](short, served.paths[1]))
    if kind == "dict":
        assert f"mtp:{name} is missing" in engine.preflight(short).problems
        assert not engine.check_weights(short).equal
    assert engine.weight_version == version
    assert served.live(old, old)
    assert outcome(engine) == started


def test_one_that_comes_by_itself_goes_before_the_one_among_the_policys(served: Served) -> None:
    engine, (old, new) = served.engine, served.weights
    version = version_of(new, served.paths[1])
    for policy in (new, tree(new), iter(new.items()), Source(new), version):
        receipt = engine.update_weights({"policy": policy, "mtp": old})
        assert set(receipt.components) == {"policy", "mtp"}
        assert served.live(new, old)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("transport", ["inline", "p2p"])
def test_it_comes_with_other_components_and_adapters(served: Served, transport: str) -> None:
    engine, (_, new) = served.engine, served.weights
    sent = {"draft": str(served.draft), "policy": tree(new)}
    if transport == "p2p":
        sent["draft"] = load_file(served.draft / "model.safetensors")
    math = {"math": adapted(served.paths[1], 8, target_modules=["q_proj"])}
    receipt = engine.update_weights(sent, adapters=math, transport=transport, timeout=20.0)
    assert {*receipt.components, *receipt.adapters} == {"policy", "mtp", "draft", "math"}
    assert served.live(new, new)


def test_changes_alone_are_sent_of_both(served: Served) -> None:
    engine, (old, new) = served.engine, served.weights
    engine.update_weights(old, encoding="delta", transport="inline")
    changed = {name: t.clone() for name, t in old.items()}
    for tensor in changed.values():
        tensor.view(-1)[0] += 0.5
    receipt = engine.update_weights(changed, encoding="delta", transport="inline")
    assert receipt.details["encoding"] == "delta"
    assert served.live(changed, changed)
    policy = {name: new[name] if served.is_head(name) else t for name, t in changed.items()}
    engine.update_weights(served.part(policy, head=False), encoding="delta", transport="inline")
    assert served.live(changed, changed)


def test_after_its_weights_were_dropped_a_stream_has_to_have_a_head(served: Served) -> None:
    engine, (old, new) = served.engine, served.weights
    draft, policy = load_file(served.draft / "model.safetensors"), served.part(new, head=False)
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(WeightMismatch, match=r"not initialized .*mtp:"):
        engine.update_weights({"policy": iter(policy.items()), "draft": draft})
    engine.update_weights({"policy": iter(new.items()), "draft": draft})
    assert served.live(new, new)
    assert not served.live(old, old)

"""Before an update that builds on the live version, its shadow is brought up to it exactly."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.distributed import TensorParallel
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import VersionConflict
from rollout.models.build import build_model
from rollout.models.weight_io.patch_journal import SHARE, PatchJournal
from rollout.weights import SparsePatch


@pytest.fixture(params=["plain", "tiles"])
def instances(request, checkpoints):
    config, weights, _ = checkpoints
    live = build_model(config, TensorParallel(0, 1), torch.float32, "cpu", request.param)
    live.load_weights(weights.items())
    return ModelInstances(live, lambda device: live.empty_like(), live.build.device)


def patches(weights, seed, share=0.002):
    """New values for a few elements of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        chosen = (torch.rand(tensor.numel(), generator=generator) < share).nonzero().flatten()
        values = torch.randn(len(chosen), generator=generator)
        yield name, SparsePatch(tuple(tensor.shape), tensor.dtype, chosen, values)


def commit(instances, items) -> None:
    load(instances, items)
    instances.commit()


def load(instances, items, partial=True) -> None:
    session = instances.open_shadow(partial)
    session.feed(items)
    session.finish(partial=partial)


def equal(instances) -> bool:
    live, shadow = instances.live.storages(), instances._shadow.storages()
    return all(torch.equal(live[name], shadow[name]) for name in live)


def test_only_what_the_last_update_changed_is_copied(instances, checkpoints) -> None:
    weights = checkpoints[1]
    commit(instances, patches(weights, 1))
    assert not equal(instances)
    spoilt = instances._shadow.storages()["model.layers.1.mlp.down_proj.weight"]
    untouched = (spoilt == instances.live.storages()["model.layers.1.mlp.down_proj.weight"]).clone()
    place = tuple(untouched.nonzero()[7])
    kept = spoilt[place].clone()
    spoilt[place] += 1
    instances.open_shadow(True)
    assert spoilt[place] == kept + 1, "an element that nobody changed was copied"
    spoilt[place] = kept
    assert equal(instances)


def test_whatever_came_before_the_shadow_begins_as_the_live_version(instances, checkpoints) -> None:
    """200 random steps: patches, whole tensors, full loads, half loads, back and forth."""
    _, first, second = checkpoints
    rng = random.Random(5)
    names = list(first)

    def sparse():
        commit(instances, patches(first, rng.randrange(1 << 30)))

    def mixed():
        items = dict(patches(first, rng.randrange(1 << 30)))
        for name in rng.sample(names, 3):
            items[name] = first[name] * rng.random()
        commit(instances, items.items())

    def few():
        items = list(patches(first, rng.randrange(1 << 30), share=0.1))
        commit(instances, rng.sample(items, 2))

    def full():
        load(instances, (rng.choice([first, second])).items(), partial=False)
        instances.commit()

    def half():
        instances.open_shadow(True).feed(patches(first, rng.randrange(1 << 30)))

    def ready():
        load(instances, patches(first, rng.randrange(1 << 30)))

    def back():
        instances.go_back()

    def revert():
        instances.revert()

    steps = [sparse, sparse, mixed, few, full, half, ready, back, revert]
    done = set()
    for turn in range(200):
        step = rng.choice(steps)
        try:
            step()
            done.add(step.__name__)
        except VersionConflict:
            assert step in (back, revert)
        if turn % 2:
            instances.open_shadow(True)
            assert equal(instances), step.__name__
    assert done == {step.__name__ for step in steps}


def test_a_journal_is_short() -> None:
    journal = PatchJournal()
    source, target = {"w": torch.arange(SHARE * 4.0)}, {"w": torch.zeros(SHARE * 4)}
    journal.note("w", torch.tensor([1, 9]), SHARE * 4)
    journal.copy(source, target)
    assert target["w"].nonzero().flatten().tolist() == [1, 9]
    journal.note("w", torch.tensor([2, 3, 4]), SHARE * 4)  # a fifth: over 1 / SHARE
    assert not journal._places
    journal.note("w", torch.tensor([5]), SHARE * 4)
    journal.copy(source, target)
    assert torch.equal(source["w"], target["w"])


def test_a_journal_keeps_no_longer_buffer_alive() -> None:
    journal = PatchJournal()
    journal.note("w", torch.arange(1 << 16)[:4], 1 << 20)
    [kept] = journal._places["w"]
    assert kept.untyped_storage().nbytes() == 16

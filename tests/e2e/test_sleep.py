"""Sleep, wake, updates, aborts and rollbacks in any order, against a small model of the engine."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import save_file
from start_engines import start
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.engine.worker.rollback import RollbackSnapshot
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import EngineBroken, EngineClosed, EngineError, SourceFailed, VersionConflict
from rollout.testing.faults import Fault, FaultyLink
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.follower import Follower

PAGE = 4
PROMPT = list(range(5, 5 + 4 * PAGE))
NEW = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
TAGS = ("weights", "kv_cache")


class Sleeping(RuleBasedStateMachine):
    """``live``: which set of weights is; None where the engine is broken."""

    rollout: Rollout
    sets: list[dict[str, torch.Tensor]]
    greedy: list[list[int]]  # of each set
    undo = "shadow"

    @initialize()
    def reset(self) -> None:
        self.rollout.wake_up()
        for _ in range(2):  # whatever came before, the first is whole and the second has a base
            self.version = self.rollout.update_weights(self.sets[0]).version
        self.live: int | None = 0
        self.before: int | None = 0  # what a rollback brings back
        self.asleep: set[str] = set()
        self.cached: set[int] = set()

    # ---- updates ----

    @precondition(lambda self: "weights" not in self.asleep)
    @rule(which=st.integers(0, 2), staging=st.sampled_from(["auto", "auto", "host", "none"]))
    def update(self, which: int, staging: str) -> None:
        receipt = self.rollout.update_weights(self.sets[which], staging=staging)
        self.version += 1
        assert receipt.version == self.version
        kept = staging != "none" or self.undo != "shadow"
        self.before, self.live = (self.live if kept else None), which

    @precondition(lambda self: "weights" not in self.asleep)
    @rule(which=st.integers(0, 2), staging=st.sampled_from(["auto", "auto", "none"]))
    def update_that_fails(self, which: int, staging: str) -> None:
        def source() -> Any:
            yield from list(self.sets[which].items())[:5]
            raise OSError("gone")

        with pytest.raises(SourceFailed):
            self.rollout.update_weights(source(), staging=staging, bucket_bytes=16 << 10)
        if self.undo == "shadow" or staging == "none":
            self.before = None
        if self.undo == "shadow" and staging == "none":
            self.live = None

    @precondition(lambda self: "weights" not in self.asleep)
    @rule()
    def rollback(self) -> None:
        if self.before is None:
            with pytest.raises(VersionConflict):
                self.rollout.rollback()
            return
        self.version = self.rollout.rollback().version
        self.live, self.before = self.before, None

    # ---- sleep ----

    @rule(level=st.sampled_from([1, 1, 2]))
    def sleep(self, level: int) -> None:
        self.rollout.sleep(level)
        self.asleep, self.before = set(TAGS), None
        self.cached.clear()
        if level == 2:
            self.live = None

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"], ["weights", "kv_cache"]]))
    def wake(self, tags: list[str] | None) -> None:
        self.rollout.wake_up(tags)
        self.asleep.difference_update(tags or TAGS)

    # ---- generation ----

    @rule()
    def generate(self) -> None:
        if self.asleep or self.live is None:
            with pytest.raises(EngineClosed if self.asleep else EngineBroken):
                self.rollout.generate([PROMPT], GREEDY)
            return
        (output,) = self.rollout.generate([PROMPT], GREEDY)
        (sample,) = output.outputs
        assert sample.token_ids == self.greedy[self.live]
        assert [(s.version, s.start, s.stop) for s in sample.weight_versions] == [
            (self.version, 0, NEW)
        ]
        assert {span.version for span in sample.kv_spans} == {self.version}
        # All whole pages but the last, which has the position that gives the first token.
        assert output.num_cached_tokens == (3 * PAGE if self.version in self.cached else 0)
        self.cached.add(self.version)

    def teardown(self) -> None:
        if not hasattr(self, "asleep"):
            return
        info = self.rollout.weight_info()
        assert info.version == self.version
        if self.live is not None and "weights" not in self.asleep:
            assert self.rollout.check_weights(self.sets[self.live]).equal


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    where = tmp_path_factory.mktemp("sleep")
    made = [write_tiny(where / str(seed), seed=seed) for seed in range(3)]
    greedy = [
        model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )[0, len(PROMPT) :].tolist()
        for model in made
    ]
    assert len({tuple(tokens) for tokens in greedy}) == 3
    return where / "0", [dict(model.state_dict()) for model in made], greedy


@pytest.mark.parametrize("undo", ["shadow", "sparse", pytest.param("host", marks=pytest.mark.more)])
def test_any_order_of_sleeps_updates_and_rollbacks_follows_the_model(models, undo) -> None:
    path, sets, greedy = models
    with start(path, 1, block_size=PAGE, undo=undo) as rollout:

        class Machine(Sleeping):
            pass

        Machine.rollout, Machine.sets, Machine.greedy, Machine.undo = rollout, sets, greedy, undo
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=7, stateful_step_count=20, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip


def test_frozen_requests_go_on_with_the_weights_that_came_while_the_cache_slept(models) -> None:
    path, sets, _ = models
    with start(path, 2) as rollout:
        stream = rollout.stream(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True, seed=3))
        first = next(stream)
        while len(first.outputs[0].token_ids) < 5:
            first = next(stream)
        rollout.sleep(2)
        rollout.wake_up(["weights"])
        with pytest.raises(EngineError):
            rollout.generate([PROMPT], GREEDY)
        receipt = rollout.update_weights(sets[1])
        with pytest.raises(EngineClosed, match="asleep"):
            rollout.generate([PROMPT], GREEDY)
        rollout.wake_up(["kv_cache"])
        *_, last = stream
        (sample,) = last.outputs
        assert len(sample.token_ids) == 300
        assert [span.version for span in sample.weight_versions] == [0, receipt.version]
        assert [span.version for span in sample.kv_spans] == [receipt.version]


@pytest.mark.parametrize("staging", ["device", "none"])
def test_an_update_whose_weights_a_sleep_drops_before_its_commit_fails(models, staging) -> None:
    path, sets, greedy = models
    with start(path, 2) as rollout:
        link = FaultyLink(rollout._async.backend.link, Fault("delay", phase="commit", seconds=1.0))
        options = UpdateOptions(staging=staging, timeout=10.0)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(publish, sets[1], connect=lambda: link, options=options)
            while rollout.weight_info().state != "staged" and not sent.done():
                time.sleep(0.01)
            rollout.sleep(2)
            with pytest.raises(VersionConflict, match="the engine fell asleep meanwhile"):
                sent.result()
        rollout.wake_up()
        assert (rollout.weight_info().state, rollout.weight_version) == ("broken", 0)
        with pytest.raises(EngineBroken):
            rollout.generate([PROMPT], GREEDY)
        rollout.update_weights(sets[2])
        assert rollout.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == greedy[2]


def test_a_followed_checkpoint_that_a_sleep_interrupts_is_taken_after_it(models, tmp_path) -> None:
    path, sets, greedy = models
    (tmp_path / "checkpoint-7").mkdir()
    save_file(sets[1], tmp_path / "checkpoint-7" / "model.safetensors")
    with start(path, 1) as rollout:
        link = FaultyLink(rollout._async.backend.link, Fault("delay", phase="commit", seconds=1.0))
        follower = Follower(tmp_path, [tmp_path], lambda: link, timeout=10.0)
        with ThreadPoolExecutor(1) as pool:
            looked = pool.submit(follower.look)
            while rollout.weight_info().state != "staged" and not looked.done():
                time.sleep(0.01)
            rollout.sleep(1)
            with pytest.raises(VersionConflict, match="the engine fell asleep meanwhile"):
                looked.result()
        rollout.wake_up()
        receipt = follower.look()
        assert receipt is not None
        assert receipt.version == 7
        assert rollout.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == greedy[1]


def test_an_update_whose_shadow_a_sleep_drops_as_it_is_begun_says_so(models, monkeypatch) -> None:
    path, sets, greedy = models
    with start(path, 1) as rollout:
        brought_up = ModelInstances._bring_up

        def bring_up(self: ModelInstances, *args: Any) -> None:
            brought_up(self, *args)
            rollout.sleep(1)

        with monkeypatch.context() as moment:
            moment.setattr(ModelInstances, "_bring_up", bring_up)
            with pytest.raises(VersionConflict, match="the engine fell asleep meanwhile"):
                rollout.update_weights(list(sets[1].items())[:2], partial=True)
        rollout.wake_up()
        assert rollout.update_weights(sets[2]).version == 1
        assert rollout.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == greedy[2]


def test_a_part_of_the_weights_that_a_sleep_has_dropped_is_refused_with_that_reason(models) -> None:
    path, sets, _ = models
    with start(path, 1) as rollout:
        rollout.sleep(2)
        part = [next(iter(dict(sets[1]).items()))]
        with pytest.raises(EngineBroken, match=r"only a full update .* sleep\(level=2\) dropped"):
            rollout.update_weights(part, partial=True)
        rollout.update_weights(sets[1])


def test_an_update_in_place_whose_weights_a_sleep_drops_as_it_is_begun_says_so(
    models, monkeypatch
) -> None:
    path, sets, greedy = models
    with start(path, 1, undo="sparse") as rollout:
        whole = RollbackSnapshot.whole

        def kept(live: Any) -> RollbackSnapshot:
            made = whole(live)
            rollout.sleep(2)
            return made

        with monkeypatch.context() as moment:
            moment.setattr(RollbackSnapshot, "whole", kept)
            with pytest.raises(EngineBroken, match=r"dropped by sleep\(level=2\)"):
                rollout.update_weights(sets[1], staging="none")
        rollout.wake_up()
        assert rollout.update_weights(sets[2]).version == 1
        assert rollout.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == greedy[2]


LARGE = {
    "vocab_size": 24000, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip


def test_sleeping_gives_memory_back_for_real(tmp_path) -> None:
    """Level 1 the shadow and the KV pages, level 2 the weights as well; waking takes them again."""
    model = write_tiny(tmp_path / "large", **LARGE)
    weights = sum(p.nbytes for p in model.parameters())
    with Rollout(
        str(tmp_path / "large"), device="cpu", dtype="float32", executor="multiprocess",
        num_threads=1, num_kv_blocks=64, max_model_len=2048, timeout=20.0, undo="host",
    ) as rollout:  # fmt: skip
        (reply,) = rollout._async.backend.core.rank_info
        pid, kv = reply["pid"], 64 * reply["kv_block_bytes"]
        assert (weights, kv) > (40 << 20, 30 << 20)
        fill(rollout)
        only_live = anonymous(pid)
        rollout.update_weights(model)
        rollout.update_weights(model)  # now a shadow is there, and a copy of the version before it
        awake = anonymous(pid)
        assert awake > only_live + 1.5 * weights
        rollout.sleep(1)
        assert anonymous(pid) < awake - 0.8 * (2 * weights + kv)
        rollout.wake_up()
        fill(rollout)
        rollout.update_weights(model)
        awake = anonymous(pid)
        rollout.sleep(2)
        assert anonymous(pid) < awake - 0.8 * (2 * weights + kv)
        rollout.wake_up()
        with pytest.raises(EngineBroken):
            rollout.generate([PROMPT], GREEDY)
        rollout.update_weights(model)
        assert rollout.generate([PROMPT], GREEDY)[0].finished
        assert anonymous(pid) < awake


def fill(rollout: Rollout) -> None:
    """Touch nearly every page of the KV cache."""
    rollout.reset_prefix_cache()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 300, (2030,), generator=generator).tolist()
    rollout.generate([prompt], SamplingParams(max_tokens=1))


def anonymous(pid: int) -> int:
    """Resident bytes that are not of a file."""
    info = psutil.Process(pid).memory_info()
    return int(info.rss - info.shared)

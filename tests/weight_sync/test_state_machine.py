"""The state machine drawn in docs/weight_sync.md, over real ranks, against a small model of it."""

from __future__ import annotations

import pytest
from engine_ranks import Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manual_update import ManualUpdate

from rollout.engine.scheduling.block_manager import BlockManager
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import (
    ChecksumMismatch,
    EngineBroken,
    IncompleteUpdate,
    RolloutError,
    TransferFailed,
    UpdateInProgress,
    VersionConflict,
    WeightMismatch,
)
from rollout.generation import SamplingParams
from rollout.kernels import digest
from rollout.weights import Box

TIMEOUT = 10.0
PAGE = 4  # positions of one KV block
PROMPT = list(range(3 * PAGE))


class Generating(Engine):
    """The rig with a prefix cache, which follows the commits as the core's does."""

    def __init__(self, *args) -> None:
        self.blocks = BlockManager(64, PAGE)
        self.steps = 0
        super().__init__(*args)

    def on_commit(self, version: int, in_flight: str, pin: object = None, **named) -> None:
        super().on_commit(version, in_flight, pin, **named)
        self.blocks.set_version(version)

    def start(self) -> Sequence:
        self.steps += 1
        seq = Sequence(
            seq_id=self.steps, request_id=str(self.steps), index=0, params=SamplingParams(),
            seed=0, prompt_token_ids=PROMPT,
        )  # fmt: skip
        assert self.blocks.admit(seq, self.blocks.find(seq))
        return seq

    def step(self, seq: Sequence, count: int) -> None:
        seq.advance(count, self.version)
        self.blocks.publish(seq)


class Updates(RuleBasedStateMachine):
    """``live``: which set of weights each tensor is of; None where the engine is broken."""

    config, sets, digests, undo = None, (), (), "shadow"

    def __init__(self) -> None:
        super().__init__()
        self.engine = Generating(self.config, 2, self.sets[0], "plain", self.undo)
        self.live: dict[str, int] | None = dict.fromkeys(self.sets[0], 0)
        self.before: dict[str, int] | None = None  # what a rollback brings back
        self.version, self.state = 0, "idle"
        self.update: ManualUpdate | None = None
        self.next: dict[str, int] = {}
        self.in_place = self.torn = self.flipped = False
        self.cached: set[int] = set()  # versions that have computed the whole prompt
        self.running: Sequence | None = None

    def teardown(self) -> None:
        if self.update is not None:
            self.update.channel.close()
        self.engine.close()

    # ---- updates ----

    @precondition(lambda self: self.update is None)
    @rule(
        which=st.integers(0, 2), scope=st.sampled_from(["full", "full", "partial"]),
        staging=st.sampled_from(["auto", "auto", "none"]), jump=st.integers(0, 3),
    )  # fmt: skip
    def begin(self, which, scope, staging, jump) -> None:
        names = [n for n in self.sets[0] if scope == "full" or "layers.1" in n]
        update = ManualUpdate(
            self.engine, {n: self.sets[which][n] for n in names}, partial=scope == "partial",
            staging=staging, version=self.version + jump if jump else None, timeout=TIMEOUT,
        )  # fmt: skip
        if scope == "partial" and self.live is None:
            with pytest.raises(EngineBroken):
                update.begin()
            return
        begun = update.begin()
        assert begun.version == self.version + max(jump, 1)
        self.update, self.state = update, "staging"
        if self.undo == "shadow" or staging == "none":
            self.before = None
        self.next = {**(self.live or {}), **dict.fromkeys(names, which)}
        self.in_place, self.torn, self.flipped = staging == "none", False, False

    @precondition(lambda self: self.update is None)
    @rule(version=st.integers(-2, 0))
    def begin_stale(self, version) -> None:
        with pytest.raises((VersionConflict, RolloutError)):
            ManualUpdate(self.engine, self.sets[0], version=self.version + version).begin()

    @precondition(lambda self: self.update is not None)
    @rule()
    def begin_second(self) -> None:
        with pytest.raises(UpdateInProgress):
            ManualUpdate(self.engine, self.sets[1], timeout=0.01).begin()

    @precondition(lambda self: self.state == "staging" and self.left())
    @rule(count=st.integers(1, 8))
    def send(self, count) -> None:
        for _ in range(count):
            if self.left():
                self.update.bucket()

    @precondition(lambda self: self.state == "staging" and self.left())
    @rule()
    def send_all(self) -> None:
        while self.left():
            self.update.bucket()

    @precondition(lambda self: self.state == "staging" and self.left() and not self.flipped)
    @rule()
    def flip(self) -> None:
        header, payload = self.update.buckets[self.update.sent]
        payload = payload.clone()
        payload[header.entries[0].offset] ^= 1
        self.update.buckets[self.update.sent] = header, payload
        self.flipped = True
        self.update.bucket()

    @precondition(lambda self: self.state == "staging" and self.left())
    @rule()
    def skip_bucket(self) -> None:
        self.update.sent += 1
        if not self.left():
            self.update.sent -= 1
            return
        with pytest.raises(TransferFailed, match="was due"):
            self.update.bucket()
        self.ended()

    # Sealing too early is no mistake where the rest would have changed nothing.
    @precondition(
        lambda self: self.state == "staging" and not (self.left() and self.next == self.live)
    )
    @rule()
    def seal(self) -> None:
        if self.left():
            with pytest.raises((WeightMismatch, IncompleteUpdate, ChecksumMismatch)):
                self.update.seal()
            self.ended()
        elif self.flipped:
            with pytest.raises(ChecksumMismatch):
                self.update.seal()
            self.ended()
        else:
            self.update.seal()
            self.state = "staged"

    @precondition(lambda self: self.state == "staging")
    @rule()
    def commit_before_seal(self) -> None:
        with pytest.raises(VersionConflict, match="commit before seal"):
            self.update.commit()

    @precondition(lambda self: self.state == "staged")
    @rule(failing=st.sampled_from([None, None, None, 0, 1]))
    def commit(self, failing) -> None:
        if failing is not None:
            self.engine.ranks[failing].fail_commit = True
            with pytest.raises((RuntimeError, RolloutError)):
                self.update.commit()
            self.engine.ranks[failing].fail_commit = False
            self.ended()
            return
        receipt = self.update.commit()
        assert receipt.digest == self.digest_of(self.next, self.update.weights)
        self.before = None if self.in_place and self.undo == "shadow" else self.live
        self.live, self.version, self.state = self.next, receipt.version, "idle"
        self.update = None

    @precondition(lambda self: self.update is not None)
    @rule(how=st.sampled_from(["close", "abort"]))
    def give_up(self, how) -> None:
        channel = self.update.channel
        channel.abort("given up") if how == "abort" else channel.close()
        self.ended()

    @precondition(lambda self: self.update is None)
    @rule(failing=st.sampled_from([None, None, 0, 1]))
    def rollback(self, failing) -> None:
        if self.before is not None and failing is not None:
            self.engine.ranks[failing].fail_commit = True
            with pytest.raises((RuntimeError, RolloutError)):
                self.engine.rollback(TIMEOUT)
            self.engine.ranks[failing].fail_commit = False
            return
        if self.before is None:
            with pytest.raises(VersionConflict, match="no predecessor"):
                self.engine.rollback(TIMEOUT)
            return
        receipt = self.engine.rollback(TIMEOUT)
        self.live, self.before = self.before, None
        self.version += 1
        assert receipt.version == self.version
        assert receipt.digest == self.digest_of(self.live, self.live)

    # ---- generation ----

    @precondition(lambda self: self.live is not None)
    @rule()
    def generate(self) -> None:
        seq = self.engine.start()
        hits = 2 * PAGE if self.version in self.cached else 0
        assert seq.num_cached_tokens == hits
        self.engine.step(seq, len(PROMPT) - hits)
        self.engine.blocks.release(seq)
        self.cached.add(self.version)

    @precondition(lambda self: self.live is not None and self.running is None)
    @rule()
    def start_request(self) -> None:
        self.running = self.engine.start()
        if self.running.num_computed == 0:
            self.engine.step(self.running, 2)

    @precondition(lambda self: self.live is not None and self.running is not None)
    @rule()
    def finish_request(self) -> None:
        """What spans a commit is of two versions, and is never found again."""
        seq, self.running = self.running, None
        self.engine.step(seq, len(PROMPT) - seq.num_computed)
        spans = seq.kv_spans.spans()
        assert spans[-1].version == self.version
        if len(spans) == 1:
            self.cached.add(self.version)
        self.engine.blocks.release(seq)

    # ---- what always holds ----

    @invariant()
    def the_engine_is_where_the_model_is(self) -> None:
        info = self.engine.info()
        assert (info.version, info.state) == (self.version, self.state)
        if self.live is not None:
            assert [rank.version for rank in self.engine.ranks] == [self.version] * 2
        assert self.engine.held == (self.update is not None and self.in_place)
        torn = self.live is None or self.engine.held
        if not torn:
            held = self.engine.digests(TIMEOUT)
            assert held == {name: self.digests[k][name] for name, k in self.live.items()}
        running = [] if self.running is None else [self.running]
        self.engine.blocks.check_integrity(running)

    # ---- helpers ----

    def left(self) -> bool:
        return self.update is not None and self.update.sent < len(self.update.buckets)

    def ended(self) -> None:
        """The update failed: v serves on, unless it was overwritten and not kept."""
        if self.in_place and self.undo == "shadow":
            self.live = None
        self.update, self.state = None, "idle" if self.live is not None else "broken"

    def digest_of(self, content, names) -> int:
        return sum(self.digests[content[name]][name] for name in names) % 2**64


@pytest.mark.parametrize("undo", ["shadow", "sparse", "host"])
def test_updates_follow_their_model(checkpoints, undo) -> None:
    config, old, new = checkpoints
    third = {name: old[name] + new[name] for name in old}

    class Machine(Updates):
        pass

    Machine.config, Machine.sets, Machine.undo = config, (old, new, third), undo
    Machine.digests = tuple(
        {n: digest(t, tuple(t.shape), Box.full(tuple(t.shape))) for n, t in weights.items()}
        for weights in Machine.sets
    )
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )

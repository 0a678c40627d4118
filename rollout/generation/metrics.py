"""Figures of a running engine: counters kept by its thread, snapshots for everybody else."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
NOT_BEGUN = "before it began"  # in the place of an update's id
STALENESS_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # versions


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """``counts[i]`` observations fell in ``(bounds[i-1], bounds[i]]``; the last is above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # sum of all observed values

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of values by fixed upper bounds (of seconds, by default). One thread writes."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One moment of an engine. Totals count since its start; times are seconds.

    ``kv_usage`` in [0, 1]; prefix figures are tokens; ``time_to_first_token`` is per request,
    ``inter_token`` per token after a sample's first. ``state``: running | paused | asleep |
    broken | fenced | dead | closed. ``seed``: of requests that bring none.
    ``state_snapshots``: of recurrent states, that a prefix can be found by; a hit is one that a
    sequence went on from. ``nan_logits_total``: samples that ended because their logits were NaN.
    ``nonfinite_tensors``:
    of the live weights, as a cold start found them; 0 where nothing looked. ``following`` is the
    directory that the service follows, "" for none; ``follow_error`` the last failure there, ""
    once a version has become live since. ``adapters``: the newest version of each that is served
    beside the weights. ``members``: of a fleet, what each does, and why it does not serve;
    ``fleet_members_lost_total``: how often one left service without being told to. ``fleet``: which
    one it is the front of, or a member under whose lease; 0: none's, or of one that does not say.
    ``serving_lease``: of a member, for how many seconds more it may serve; None: it is none.
    ``weight_update_errors``: "UPDATE_ID: REASON" of the last
    updates that failed, 8 at most, oldest first. ``encoder_cache_...``: visuals that steps needed,
    those whose features were there already, and what is kept on each rank. ``staleness``: of
    samples that ended, how many versions their oldest token was behind; ``stale_..._total``: how
    often one went beyond its ``max_staleness`` at a commit, by what became of it.
    ``pinned_...``: requests that finish on the version before the live one, which that is (-1:
    none), steps by it so far; ``pin_fallbacks_total``: requests whose pin was ended for them.
    ``spec_...``: drafts of tokens that steps verified, how many tokens those had, and how many were
    right. ``paused``: also where ``state`` says something else, as in a sleep.
    """

    state: str
    running: int
    waiting: int
    kv_usage: float
    num_kv_blocks: int
    prompt_tokens_total: int
    generation_tokens_total: int
    steps_total: int
    preemptions_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    requests_finished: Mapping[str, int]
    nan_logits_total: int
    epoch: int
    seed: int
    weight_version: int
    weight_updates_total: int
    weight_updates_failed_total: int
    last_stall_seconds: float
    time_to_first_token: HistogramSnapshot
    inter_token: HistogramSnapshot
    state_snapshots: int = 0
    state_snapshot_hits_total: int = 0
    state_snapshot_saves_total: int = 0
    state_snapshot_evictions_total: int = 0
    weight_updates_nonfinite_total: int = 0
    nonfinite_tensors: int = 0
    staleness: HistogramSnapshot = HistogramSnapshot((), (0,), 0.0)
    pinned_requests: int = 0
    pinned_version: int = -1
    pinned_steps_total: int = 0
    pin_fallbacks_total: int = 0
    stale_recomputed_total: int = 0
    stale_finished_total: int = 0
    stale_aborted_total: int = 0
    following: str = ""
    follow_error: str = ""
    follow_failures_total: int = 0
    weight_update_errors: tuple[str, ...] = ()
    adapters: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, str] = field(default_factory=dict)
    fleet_members_lost_total: int = 0
    fleet: int = 0
    serving_lease: float | None = None
    paused: bool = False
    encoder_cache_queries_total: int = 0
    encoder_cache_hits_total: int = 0
    encoder_cache_bytes: int = 0
    spec_drafts_total: int = 0
    spec_draft_tokens_total: int = 0
    spec_accepted_tokens_total: int = 0


@dataclass(slots=True)
class EngineCounters:
    """What the engine's own thread (and, for the update figures, the coordinator) counts."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    nan_logits: int = 0
    updates: int = 0
    updates_failed: int = 0
    updates_nonfinite: int = 0
    nonfinite_tensors: int = 0
    following: str = ""
    follow_error: str = ""
    follow_failures: int = 0
    is_served: bool = False  # to others, who may have sent an update that fails
    update_errors: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    last_stall: float = 0.0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    staleness: Histogram = field(default_factory=lambda: Histogram(STALENESS_BOUNDS))
    pinned_steps: int = 0
    pin_fallbacks: int = 0
    stale: dict[str, int] = field(default_factory=lambda: {"recompute": 0, "finish": 0, "abort": 0})

    def record_nonfinite(self) -> None:
        """Count an update that is refused for NaN or infinity."""
        self.updates_nonfinite += 1

    def record_update(self, stall: float) -> None:
        """Count a committed update that stalled generation for ``stall`` seconds."""
        self.updates += 1
        self.last_stall = stall
        self.nonfinite_tensors = 0

    def record_failed_update(self, update_id: str, reason: str) -> None:
        self.updates_failed += 1
        self.update_errors.append(f"{update_id}: {reason[:1000]}")

    def snapshot(self) -> dict[str, Any]:
        """Fields of ``EngineStats``."""
        return {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "steps_total": self.steps,
            "spec_drafts_total": self.drafts,
            "spec_draft_tokens_total": self.draft_tokens,
            "spec_accepted_tokens_total": self.accepted_tokens,
            "nan_logits_total": self.nan_logits,
            "weight_updates_total": self.updates,
            "weight_updates_failed_total": self.updates_failed,
            "weight_updates_nonfinite_total": self.updates_nonfinite,
            "nonfinite_tensors": self.nonfinite_tensors,
            "last_stall_seconds": self.last_stall,
            "time_to_first_token": self.time_to_first_token.snapshot(),
            "inter_token": self.inter_token.snapshot(),
            "staleness": self.staleness.snapshot(),
            "pinned_steps_total": self.pinned_steps,
            "pin_fallbacks_total": self.pin_fallbacks,
            "stale_recomputed_total": self.stale["recompute"],
            "stale_finished_total": self.stale["finish"],
            "stale_aborted_total": self.stale["abort"],
            "following": self.following,
            "follow_error": self.follow_error,
            "follow_failures_total": self.follow_failures,
            "requests_finished": dict(self.finished),
            "weight_update_errors": tuple(self.update_errors),
        }

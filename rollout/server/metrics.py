"""``/metrics``: an engine's figures in Prometheus' text format.

Each figure has our own name (``rollout_...``); those that vLLM also has come a second time under
its exact name, so that dashboards and routers made for it work. One registry per server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rollout.fleet.coordination.member import Status
from rollout.generation.metrics import EngineStats, HistogramSnapshot

# field of EngineStats, our name after "rollout_", vLLM's name after "vllm:" or None, help
GAUGES = (
    ("running", "running_requests", "num_requests_running", "Requests being generated"),
    ("waiting", "waiting_requests", "num_requests_waiting", "Requests waiting to be admitted"),
    ("state_snapshots", "state_snapshots", None, "Snapshots of recurrent states"),
    ("kv_usage", "kv_cache_usage", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
    ("num_kv_blocks", "kv_blocks", None, "KV blocks of each rank"),
    ("weight_version", "weight_version", None, "Version of the live weights"),
    ("pinned_requests", "pinned_requests", None, "Requests that finish on an older version"),
    ("pinned_version", "pinned_version", None, "The version they finish on, -1 for none"),
    ("nonfinite_tensors", "nonfinite_tensors", None, "Tensors of the checkpoint with NaN or inf"),
    (
        "encoder_cache_bytes",
        "encoder_cache_bytes",
        None,
        "Features of what is seen kept on each rank",
    ),
    ("last_stall_seconds", "last_stall_seconds", None, "Generation pause of the last commit"),
)
# field of EngineStats, which is our name, too; vLLM's name or None, help
COUNTERS = (
    ("prompt_tokens_total", "prompt_tokens", "Prompt tokens taken in"),
    ("generation_tokens_total", "generation_tokens", "Tokens generated"),
    ("steps_total", None, "Engine steps"),
    ("preemptions_total", "num_preemptions", "Requests put back to wait"),
    ("prefix_cache_queries_total", "prefix_cache_queries", "Prompt tokens looked up in the cache"),
    ("prefix_cache_hits_total", "prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    ("spec_drafts_total", "spec_decode_num_drafts", "Drafts of tokens that steps verified"),
    ("spec_draft_tokens_total", "spec_decode_num_draft_tokens", "Tokens of those drafts"),
    ("spec_accepted_tokens_total", "spec_decode_num_accepted_tokens", "Tokens that were right"),
    (
        "encoder_cache_queries_total",
        None,
        "Images, and times or wholes of videos, that steps needed",
    ),
    ("encoder_cache_hits_total", None, "Those whose features were kept from an earlier step"),
    ("state_snapshot_hits_total", None, "Sequences that went on from a snapshot of states"),
    ("state_snapshot_saves_total", None, "Snapshots of states made"),
    ("state_snapshot_evictions_total", None, "Snapshots of states that made room for others"),
    ("nan_logits_total", None, "Samples that ended because their logits were NaN"),
    ("pinned_steps_total", None, "Engine steps by a version that is no longer live"),
    ("pin_fallbacks_total", None, "Requests whose pin to a version was ended for them"),
    ("stale_recomputed_total", None, "Samples beyond max_staleness whose KV was made again"),
    ("stale_finished_total", None, "Samples beyond max_staleness that ended with what they had"),
    ("stale_aborted_total", None, "Samples beyond max_staleness that were aborted"),
    ("weight_updates_total", None, "Committed weight updates"),
    ("weight_updates_failed_total", None, "Aborted weight updates"),
    ("weight_updates_nonfinite_total", None, "Weight updates refused for NaN or infinity"),
    ("follow_failures_total", None, "Failed looks at what --follow names"),
    ("fleet_members_lost_total", None, "Times a fleet's member left service without being told to"),
)
# field of EngineStats, our name, whether vLLM has it by that name, too, help
HISTOGRAMS = (
    ("time_to_first_token", "time_to_first_token_seconds", True, "Time to a request's first token"),
    ("inter_token", "inter_token_latency_seconds", True, "Time between a sample's tokens"),
    ("staleness", "staleness_versions", False, "Versions that ended samples began behind"),
)
# column of a fleet's members, our name after "rollout_fleet_member_", help
MEMBER_GAUGES = (
    ("version", "weight_version", "Version of a member's live weights"),
    ("running", "running_requests", "Requests that a member generates"),
    ("waiting", "waiting_requests", "Requests that wait at a member"),
)
STATES = ("running", "paused", "asleep", "broken", "fenced", "leaving", "dead", "closed")

Simple = CounterMetricFamily | GaugeMetricFamily
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class StatsCollector(Collector):
    """Reads ``stats()`` at each scrape; nothing is kept between scrapes."""

    def __init__(self, stats: Callable[[], EngineStats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[Family]:
        stats = self._stats()
        for name, ours, theirs, text in GAUGES:
            for full in _names(ours, theirs):
                yield self._add(GaugeMetricFamily(full, text, labels=["model_name"]), stats, name)
        for name, theirs, text in COUNTERS:
            for full in _names(name.removesuffix("_total"), theirs):
                family = CounterMetricFamily(full, text, labels=["model_name"])
                yield self._add(family, stats, name)
        for name, ours, shared, text in HISTOGRAMS:
            for full in _names(ours, ours if shared else None):
                yield self._histogram(full, text, getattr(stats, name))
        yield from self._by_reason(stats)
        yield self._adapters(stats)
        yield self._state(stats)

    def _add(self, family: Simple, stats: EngineStats, name: str) -> Simple:
        family.add_metric([self._model], getattr(stats, name))
        return family

    def _histogram(self, name: str, text: str, value: HistogramSnapshot) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        buckets, below = [], 0
        bounds = (*map(str, value.bounds), "+Inf")
        for bound, count in zip(bounds, value.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric([self._model], buckets, sum_value=value.total)
        return family

    def _by_reason(self, stats: EngineStats) -> Iterator[CounterMetricFamily]:
        for full in _names("requests_finished", "request_success"):
            label = "finished_reason"
            family = CounterMetricFamily(
                full, "Requests ended, by reason", labels=["model_name", label]
            )
            for reason, count in stats.requests_finished.items():
                family.add_metric([self._model, reason], count)
            yield family

    def _adapters(self, stats: EngineStats) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "rollout_adapter_version",
            "Newest version of an adapter beside the weights",
            labels=["model_name", "adapter"],
        )
        for name, version in stats.adapters.items():
            family.add_metric([self._model, name], version)
        return family

    def _state(self, stats: EngineStats) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "rollout_state", "1 for the engine's state", labels=["model_name", "state"]
        )
        for state in STATES:
            family.add_metric([self._model, state], float(state == stats.state))
        return family


class MembersCollector(Collector):
    """The members of a fleet, as its front's ``members()`` has them; what one has not said yet is
    left out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], model: str) -> None:
        self._rows, self._model = rows, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        count = GaugeMetricFamily(
            "rollout_fleet_members", "Members of the fleet", labels=["model_name", "status"]
        )
        found = Counter(row["status"] for row in self._rows)
        for status in Status:
            count.add_metric([self._model, status], found[status])
        yield count
        serving = {row["name"]: row["status"] == Status.SERVING for row in self._rows}
        yield self._by_member("serving", "Whether a member serves", serving)
        for column, ours, text in MEMBER_GAUGES:
            yield self._by_member(ours, text, {row["name"]: row[column] for row in self._rows})

    def _by_member(
        self, name: str, text: str, values: Mapping[str, float | None]
    ) -> GaugeMetricFamily:
        full = f"rollout_fleet_member_{name}"
        family = GaugeMetricFamily(full, text, labels=["model_name", "member"])
        for member, value in values.items():
            if value is not None:
                family.add_metric([self._model, member], value)
        return family


def render(
    stats: EngineStats | None, model: str, members: Sequence[Mapping[str, Any]] | None = None
) -> bytes:
    """The exposition text of one moment. ``members``: of a fleet; ``stats``: None where none of
    them answers.
    """
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        registry.register(StatsCollector(lambda: stats, model))
    if members is not None:
        registry.register(MembersCollector(members, model))
    return generate_latest(registry)


def _names(ours: str, theirs: str | None) -> list[str]:
    return [f"rollout_{ours}"] + ([f"vllm:{theirs}"] if theirs else [])

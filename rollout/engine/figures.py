"""One moment of an engine's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.metrics import EngineStats

if TYPE_CHECKING:
    from rollout.engine.core import EngineCore


def figures(core: EngineCore) -> EngineStats:
    count = core.counters
    return EngineStats(
        state=core.state,
        running=len(core.scheduler.running),
        waiting=core.scheduler.num_waiting,
        kv_usage=core.blocks.usage,
        num_kv_blocks=core.num_kv_blocks,
        prompt_tokens_total=count.prompt_tokens,
        generation_tokens_total=count.generation_tokens,
        steps_total=count.steps,
        preemptions_total=core.scheduler.preemptions,
        prefix_cache_queries_total=core.blocks.query_tokens,
        prefix_cache_hits_total=core.blocks.hit_tokens,
        requests_finished=dict(count.finished),
        nan_logits_total=count.nan_logits,
        epoch=core.epoch,
        seed=core.seed,
        weight_version=core.version,
        weight_updates_total=count.updates,
        weight_updates_failed_total=count.updates_failed,
        weight_updates_nonfinite_total=count.updates_nonfinite,
        nonfinite_tensors=count.nonfinite_tensors,
        last_stall_seconds=count.last_stall,
        time_to_first_token=count.time_to_first_token.snapshot(),
        inter_token=count.inter_token.snapshot(),
        following=count.following,
        follow_error=count.follow_error,
        follow_failures_total=count.follow_failures,
    )

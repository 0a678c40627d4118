"""Which layers each stage of a pipeline has: so that the largest stage is as small as can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from rollout.distributed.stage import Stage
from rollout.models.config.model import ModelConfig


def stage_layers(config: ModelConfig, stage: Stage) -> range:
    """The numbers of the layers that are here; each stage has one at least.

    Sizes are about those of the weights. The first stage has the embedding and the head, too.
    """
    costs = tuple(_size(config, layer) for layer in range(config.num_layers))
    ends = config.vocab_size * config.hidden_size * (1 if config.tied or config.labels else 2)
    stops = _cut(costs, ends, stage.count)
    return range(stops[stage.index], stops[stage.index + 1])


def own_layers(config: ModelConfig, stage: Stage, layers: Sequence[int]) -> tuple[int, ...]:
    """Those of ``layers`` that are here, counted from the stage's first one."""
    held = stage_layers(config, stage)
    return tuple(layer - held.start for layer in layers if layer in held)


@lru_cache(maxsize=64)
def _cut(costs: tuple[int, ...], ends: int, count: int) -> tuple[int, ...]:
    """Where stages begin, and the end of the last, for layers of such ``costs``; the first stage
    has ``ends`` besides.

    By the least limit under which ``count`` stages hold all, each filled up to it in turn.
    """
    sums = [0, *accumulate(costs)]
    low, high = max(costs), sums[-1] + ends
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if _filled(sums, ends, count, limit) else (limit + 1, high)
    stops = _filled(sums, ends, count, low)
    assert stops is not None, "all layers are within the highest limit"
    return stops


def _filled(sums: Sequence[int], ends: int, count: int, limit: int) -> tuple[int, ...] | None:
    """The stops of stages that hold at most ``limit``, the first one maybe its one layer beyond
    it; None where layers are left.
    """
    stops, total = [0], len(sums) - 1
    for stage in range(count):
        room = limit - (0 if stage else ends)
        stop = bisect_right(sums, sums[stops[-1]] + room) - 1
        left = total - (count - 1 - stage)  # a layer for each stage behind this one
        stops.append(min(max(stop, stops[-1] + 1), left))
    return tuple(stops) if stops[-1] == total else None


def _size(config: ModelConfig, layer: int) -> int:
    """About how many weights a layer has."""
    hidden, moe = config.hidden_size, config.moe
    of = config.layers[layer] if config.layers else None
    mixer = 2 * hidden * (config.num_heads + config.num_kv_heads) * config.head_dim
    feeds = 3 * hidden * config.intermediate_size
    if moe is not None and (moe.is_sparse(layer) if not config.arch.lone else True):
        inner = moe.num_experts * moe.expert_size
        feeds = 3 * (moe.narrow or hidden) * inner + 3 * hidden * moe.shared_size
    if of is None or not config.arch.lone:
        return mixer + feeds
    if of.feeds is None:
        return mixer
    return feeds if of.feeds == "moe" else 3 * hidden * config.intermediate_size

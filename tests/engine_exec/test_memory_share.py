"""What ``gpu_memory_utilization`` leaves for the KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.config import EngineConfig
from rollout.engine.memory_plan import size_kv
from rollout.errors import ConfigError

MIB = 1 << 20
GPU = {
    "device": "cuda:0", "total_bytes": 1000 * MIB, "free_bytes": 900 * MIB, "kv_block_bytes": MIB,
    "weight_bytes": 100 * MIB, "host_free_bytes": 900 * MIB, "graph_bytes": 10 * MIB,
}  # fmt: skip


def blocks(share: float | None, reply: dict[str, Any] = GPU, **settings: Any) -> int:
    config = EngineConfig(
        model="m", gpu_memory_utilization=share, block_size=1, max_num_seqs=2000, **settings
    )
    return size_kv(config, 100, [reply]).num_blocks


def test_weights_staging_and_kv_cache_take_that_share_of_the_whole_card() -> None:
    assert blocks(0.5) == 500 - 100 - 100 - 10
    assert blocks(0.5, staging="none") == blocks(0.5, staging="host") == 500 - 100 - 10
    assert blocks(0.5, {**GPU, "adapter_bytes": 40 * MIB}) == 500 - 100 - 100 - 10 - 40


def test_no_share_takes_more_than_nine_tenths_of_what_is_free() -> None:
    free = int((900 - 100 - 10) * 0.9)
    assert blocks(None) == blocks(1.0) == free
    assert blocks(0.5, {**GPU, "free_bytes": 300 * MIB}) == int((300 - 100 - 10) * 0.9)


def test_a_share_that_weights_and_staging_fill_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"is 200.0 MiB of cuda:0, and .* take 210.0 MiB"):
        blocks(0.2)
    with pytest.raises(ConfigError, match="on a CPU use kv_cache_bytes"):
        blocks(0.5, {**GPU, "device": "cpu"})


def test_recurrent_states_take_a_quarter_of_what_the_share_leaves() -> None:
    states = {**GPU, "state_slot_bytes": 10 * MIB}
    assert blocks(0.5, states) == 500 - 100 - 100 - 10 - 70
    with pytest.raises(ConfigError, match=r"to the 290.0 MiB that are free"):
        blocks(0.5, states, state_cache_bytes=300 * MIB)

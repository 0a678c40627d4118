"""How many KV blocks a rank gets, and how long a sequence may become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.config import EngineConfig
from rollout.errors import ConfigError

CPU_DEFAULT_BYTES = 4 << 30
CPU_SHARE = 0.25  # of what is free once the shadow is reserved
DEVICE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KVSize:
    """``num_blocks`` per rank, and the ``max_model_len`` that they can hold for one sequence."""

    num_blocks: int
    max_model_len: int


def size_kv(config: EngineConfig, longest: int, ranks: Sequence[Mapping[str, Any]]) -> KVSize:
    """Decide from the settings, the model's own ``longest`` context and the ranks' start replies.

    A reply has ``free_bytes`` (now, with the weights loaded), ``weight_bytes``, ``kv_block_bytes``
    and ``device``. The shadow's bytes are reserved first unless ``staging="none"``. A
    ``max_model_len`` that was asked for must fit; one that was not is cut to what fits. Raises
    ``ConfigError`` with the sizes.
    """
    wanted = config.max_model_len or longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is above the model's own maximum of {longest} tokens"
        )
    blocks = config.num_kv_blocks or min(_affordable(config, reply, len(ranks)) for reply in ranks)
    most = -(-wanted // config.block_size) * config.max_num_seqs
    if config.num_kv_blocks is None and config.kv_cache_bytes is None:
        blocks = min(blocks, most)
    room = blocks * config.block_size
    if room < wanted:
        if config.max_model_len is not None or blocks < 1:
            block_bytes = max(int(reply["kv_block_bytes"]) for reply in ranks)
            need = -(-wanted // config.block_size)
            raise ConfigError(
                f"too little memory for one sequence: max_model_len {wanted} needs {need} KV "
                f"blocks ({_mib(need * block_bytes)} per rank), {max(blocks, 0)} fit "
                f"({_mib(max(blocks, 0) * block_bytes)}); lower max_model_len or raise "
                "kv_cache_bytes / num_kv_blocks"
            )
        wanted = room
    return KVSize(blocks, wanted)


def _affordable(config: EngineConfig, reply: Mapping[str, Any], num_ranks: int) -> int:
    block_bytes = int(reply["kv_block_bytes"])
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // block_bytes
    on_cpu = str(reply["device"]).startswith("cpu")
    # Ranks of one host share its memory; each device has its own.
    free = int(reply["free_bytes"]) // (num_ranks if on_cpu else 1)
    shadow = _shadow_bytes(config, reply, on_cpu)
    if shadow > free:
        raise ConfigError(
            f"too little memory for staging={config.staging!r}: the shadow of the weights needs "
            f"{_mib(shadow)} per rank, {_mib(free)} are free; use staging='none' or more ranks"
        )
    spare = free - shadow
    if on_cpu:
        return min(CPU_DEFAULT_BYTES, int(spare * CPU_SHARE)) // block_bytes
    return int(spare * DEVICE_SHARE) // block_bytes


def _shadow_bytes(config: EngineConfig, reply: Mapping[str, Any], on_cpu: bool) -> int:
    """What staging will take from the memory that the KV cache lies in."""
    if config.staging == "none" or (config.staging == "host" and not on_cpu):
        return 0
    return int(reply["weight_bytes"])


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"

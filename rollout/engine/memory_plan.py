"""How a rank's memory is shared out at start: KV blocks, states, staging, adapters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.models.decoder.kv_groups import KVGroup, blocks_of_sequence, groups_told

CPU_DEFAULT_BYTES = 4 << 30
CPU_SHARE = 0.25  # of what is free once the shadow is reserved
DEVICE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KVSize:
    """``num_blocks`` per rank, and the ``max_model_len`` that they can hold for one sequence.

    Of recurrent states, where there are any: slots of ``running`` sequences, which are the most
    that run at a time, and of ``snapshots``. ``windows``: what those save, in words, where layers
    forget what is out of reach.
    """

    num_blocks: int
    max_model_len: int
    running: int = 0
    snapshots: int = 0
    windows: str = ""

    @property
    def num_states(self) -> int:
        return self.running + self.snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the largest rank. ``undo`` is the most it can be, and always in host memory.

    ``states``: of the recurrent states of ``running`` sequences and of ``snapshots``; ``adapters``:
    of all their slots.
    """

    weights: int
    staging: int
    undo: int
    kv: int
    states: int
    running: int
    snapshots: int
    adapters: int
    where: str  # the device of the weights
    staging_where: str
    undo_by: str

    def to_dict(self) -> dict[str, int]:
        few = [name for name in ("states", "adapters") if getattr(self, name)]
        return {name: getattr(self, name) for name in ("weights", "staging", "undo", "kv", *few)}

    def __str__(self) -> str:
        undo = f"{mib(self.undo)} of host memory at most" if self.undo else "nothing more"
        return (
            f"of each rank: {mib(self.weights)} of weights on {self.where}, {mib(self.staging)} "
            f"for staging on {self.staging_where}, undo={self.undo_by!r} takes {undo}, "
            f"{mib(self.kv)} of KV cache" + self._of_states + self._of_adapters
        )

    @property
    def _of_adapters(self) -> str:
        return f", {mib(self.adapters)} of slots for adapters" if self.adapters else ""

    @property
    def _of_states(self) -> str:
        if not self.states:
            return ""
        return (
            f", {mib(self.states)} of recurrent states: {self.running} of sequences, "
            f"{self.snapshots} snapshots"
        )


def plan_memory(
    config: EngineConfig, size: KVSize, ranks: Sequence[Mapping[str, Any]]
) -> MemoryPlan:
    """What each use takes, with the ranks' start replies and the sizes decided on."""
    where = str(ranks[0]["device"])
    on_cpu = where.startswith("cpu")
    weights = max(int(reply["weight_bytes"]) for reply in ranks)
    host = config.staging == "host"
    return MemoryPlan(
        weights=weights,
        staging=max(_staging_bytes(config, reply) for reply in ranks),
        undo=_undo_bytes(config, weights),
        kv=size.num_blocks * max(int(reply["kv_block_bytes"]) for reply in ranks),
        states=size.num_states * _slot_bytes(ranks),
        running=size.running,
        snapshots=size.snapshots,
        adapters=max(int(reply.get("adapter_bytes", 0)) for reply in ranks),
        where=where,
        staging_where="cpu" if host or on_cpu else where,
        undo_by=config.undo,
    )


def size_kv(config: EngineConfig, longest: int, ranks: Sequence[Mapping[str, Any]]) -> KVSize:
    """Decide from the settings, the model's own ``longest`` context and the ranks' start replies.

    A reply has ``free_bytes`` (now, with the weights loaded), ``weight_bytes``, ``kv_block_bytes``
    and ``device``, maybe ``pending_bytes`` of incomplete quantised tensors; on a device of its own
    also ``total_bytes`` and ``host_free_bytes``, of a model with recurrent states
    ``state_slot_bytes``, and the ``kv_groups`` of its layers, if not one that keeps every position.
    The shadow's bytes are reserved first unless ``staging="none"``, and those of ``undo``, then
    those of states. A ``max_model_len`` that was asked for must fit; one that was not is cut to
    what fits. Raises ``ConfigError`` with the sizes.
    """
    for reply in ranks:
        _spare(config, reply, len(ranks))
        if config.gpu_memory_utilization is not None and _on_cpu(reply):
            raise ConfigError("gpu_memory_utilization is of GPUs: on a CPU use kv_cache_bytes")
    wanted = served_length(config, longest)
    running, snapshots = _state_slots(config, ranks)
    taken = (running + snapshots) * _slot_bytes(ranks)
    ranks = [{**reply, "state_bytes": taken} for reply in ranks]
    blocks = config.num_kv_blocks or min(_affordable(config, reply, len(ranks)) for reply in ranks)
    _check_asked(config, blocks, ranks)
    groups, size = reported_groups(ranks[0]), config.block_size
    need = blocks_of_sequence(groups, wanted, config.max_num_batched_tokens, size)
    enough = need * config.max_num_seqs  # more are never in use
    block_bytes = max(int(reply["kv_block_bytes"]) for reply in ranks)
    if config.num_kv_blocks is None and not block_bytes:
        blocks = enough  # they take no memory, and no bytes that were asked for say how many
    elif config.num_kv_blocks is None and config.kv_cache_bytes is None:
        blocks = min(blocks, enough)
    if blocks < need:
        most = _most_tokens(config, groups, blocks, wanted)
        if config.max_model_len is not None or most < 1:
            raise ConfigError(
                f"too little memory for one sequence: max_model_len {wanted} needs {need} KV "
                f"blocks ({mib(need * block_bytes)} per rank), {max(blocks, 0)} fit "
                f"({mib(max(blocks, 0) * block_bytes)}); lower max_model_len or raise "
                "kv_cache_bytes / num_kv_blocks"
            )
        wanted = most
    saved = _saved_by_windows(config, groups, wanted, block_bytes)
    return KVSize(blocks, wanted, running, snapshots, saved)


def served_length(config: EngineConfig, longest: int) -> int:
    """Tokens of one, as asked for; ``longest``: the model's own maximum."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own maximum of {longest} "
            "tokens; if its rope goes further, hf_overrides={'max_position_embeddings': N} says so"
        )
    return config.max_model_len or longest


def reported_groups(reply: Mapping[str, Any]) -> tuple[KVGroup, ...]:
    """The groups of layers that share pages, as a rank's start reply tells them."""
    return groups_told(reply.get("kv_groups") or [[1, 0, 0]])


def _most_tokens(config: EngineConfig, groups: Sequence[KVGroup], blocks: int, wanted: int) -> int:
    """Of the longest sequence that ``blocks`` hold, in whole blocks."""
    size, ahead = config.block_size, config.max_num_batched_tokens
    counts = range(-(-wanted // size) + 1)
    fit = bisect_right(
        counts, blocks, key=lambda count: blocks_of_sequence(groups, count * size, ahead, size)
    )
    return (fit - 1) * size


def _saved_by_windows(
    config: EngineConfig, groups: Sequence[KVGroup], tokens: int, block_bytes: int
) -> str:
    """What a sequence of ``tokens`` holds at the most, and what it would if no layer forgot."""
    if not any(group.forgets for group in groups):
        return ""
    size, ahead = config.block_size, config.max_num_batched_tokens
    held = blocks_of_sequence(groups, tokens, ahead, size) * block_bytes
    layers = [len(group.layers) for group in groups]
    whole = -(-tokens // size) * block_bytes * sum(layers) // max(layers)
    if held >= whole:
        return ""
    return (
        f"of {tokens} tokens a sequence holds {mib(held)} of KV cache at the most, "
        f"{mib(whole)} without windows"
    )


def _slot_bytes(ranks: Sequence[Mapping[str, Any]]) -> int:
    return max(int(reply.get("state_slot_bytes", 0)) for reply in ranks)


def _state_slots(config: EngineConfig, ranks: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Slots of recurrent states: of running sequences, and as many or more of snapshots.

    By default one of each for ``max_num_seqs``, and one more for each that may be drafted for, if
    they fit beside a KV cache; fewer slots are fewer sequences that run at a time.
    """
    each, asked = _slot_bytes(ranks), config.state_cache_bytes
    if not each:
        return 0, 0
    spare = min(min(_spare(config, reply, len(ranks)), _allowed(config, reply)) for reply in ranks)
    if asked is not None and not 2 * each <= asked <= spare:
        raise ConfigError(
            f"state_cache_bytes={asked} must be from {2 * each} (the states of one sequence and "
            f"one snapshot) to the {mib(spare)} that are free beside the weights, staging and undo"
        )
    share = spare // 4 if asked is None else asked
    if asked is None and _on_cpu(ranks[0]):
        share = min(CPU_DEFAULT_BYTES, share)
    slots = share // each
    if asked is None:
        drafted = config.max_drafting(str(ranks[0]["device"]).partition(":")[0])
        drafted = min(drafted, config.max_num_seqs) if config.num_speculative_tokens else 0
        slots = min(slots, 2 * config.max_num_seqs + drafted)
    if slots < 2:
        raise ConfigError(
            f"too little memory for recurrent states: a sequence takes {mib(each)} per rank, and "
            f"a quarter of {mib(spare)} is theirs; use more ranks, or set state_cache_bytes"
        )
    running = min(config.max_num_seqs, slots // 2)
    return running, slots - running


def _check_asked(config: EngineConfig, blocks: int, ranks: Sequence[Mapping[str, Any]]) -> None:
    """A cache that was asked for by its size must fit in what is free, whatever it will use."""
    asked = "num_kv_blocks" if config.num_kv_blocks is not None else "kv_cache_bytes"
    if getattr(config, asked) is None:
        return
    for reply in ranks:
        nbytes, spare = blocks * int(reply["kv_block_bytes"]), _spare(config, reply, len(ranks))
        if nbytes > spare:
            raise ConfigError(
                f"{asked}={getattr(config, asked)} is a KV cache of {mib(nbytes)} on each rank, "
                f"but {mib(spare)} are free beside the weights, staging and undo; lower it, or "
                "leave it out"
            )


def _affordable(config: EngineConfig, reply: Mapping[str, Any], num_ranks: int) -> int:
    block_bytes = max(1, int(reply["kv_block_bytes"]))  # 0 where all layers carry states alone
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // block_bytes
    spare = _spare(config, reply, num_ranks)
    if _on_cpu(reply):
        return min(CPU_DEFAULT_BYTES, int(spare * CPU_SHARE)) // block_bytes
    return min(int(spare * DEVICE_SHARE), _allowed(config, reply)) // block_bytes


def _allowed(config: EngineConfig, reply: Mapping[str, Any]) -> int:
    """Of ``gpu_memory_utilization``, what is left for the KV cache on the reply's device."""
    share = config.gpu_memory_utilization
    if share is None:
        return int(reply["free_bytes"])
    whole = int(share * int(reply["total_bytes"]))
    taken = int(reply["weight_bytes"]) + int(reply.get("adapter_bytes", 0)) + _beside(config, reply)
    if taken >= whole:
        raise ConfigError(
            f"gpu_memory_utilization={share} is {mib(whole)} of {reply['device']}, and weights and "
            f"staging take {mib(taken)}: raise it, or use staging='host' or more ranks"
        )
    return whole - taken


def _beside(config: EngineConfig, reply: Mapping[str, Any]) -> int:
    """What lies on a GPU beside live weights and KV cache."""
    shadow = 0 if config.staging == "host" else _staging_bytes(config, reply)
    return shadow + int(reply.get("state_bytes", 0)) + int(reply.get("graph_bytes", 0))


def _spare(config: EngineConfig, reply: Mapping[str, Any], num_ranks: int) -> int:
    """What is left for the KV cache where it lies, once staging and undo have theirs."""
    weights = int(reply["weight_bytes"])
    shadow = _staging_bytes(config, reply)
    undo = _undo_bytes(config, weights)
    states = int(reply.get("state_bytes", 0))
    if _on_cpu(reply):  # ranks of one host share its memory; each device has its own
        free = int(reply["free_bytes"]) // num_ranks
        _check_room(config, shadow, undo, free, "")
        return free - shadow - undo - states
    free = int(reply["free_bytes"])
    host_free = int(reply.get("host_free_bytes", 0)) // num_ranks
    on_host = shadow if config.staging == "host" else 0
    _check_room(config, shadow - on_host, 0, free, f" on {reply['device']}")
    _check_room(config, on_host, undo, host_free, " of host memory")
    return free - _beside(config, reply)


def _check_room(config: EngineConfig, shadow: int, undo: int, free: int, where: str) -> None:
    if shadow > free:
        raise ConfigError(
            f"too little memory for staging={config.staging!r}: the shadow of the weights needs "
            f"{mib(shadow)} per rank, {mib(free)}{where} are free; use staging='none' or more "
            "ranks"
        )
    if shadow + undo > free:
        raise ConfigError(
            f"too little memory for undo={config.undo!r}: it may need {mib(undo)} per rank beside "
            f"{mib(shadow)} for staging, {mib(free)}{where} are free; use undo='shadow'"
        )


def _staging_bytes(config: EngineConfig, reply: Mapping[str, Any]) -> int:
    """The shadow, and what an update keeps of quantised tensors until they are complete."""
    shadow = 0 if config.staging == "none" else int(reply["weight_bytes"])
    return shadow + int(reply.get("pending_bytes", 0))


def _undo_bytes(config: EngineConfig, weight_bytes: int) -> int:
    """The most that is kept for going back, beside the shadow: one copy, sparse ones included."""
    return 0 if config.undo == "shadow" else weight_bytes


def _on_cpu(reply: Mapping[str, Any]) -> bool:
    return str(reply["device"]).startswith("cpu")


def mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"

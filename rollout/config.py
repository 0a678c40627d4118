"""Engine settings: one frozen, keyword-only tree that refuses unknown keys."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rollout.errors import ConfigError, InvalidRequest

DEFAULT_TIMEOUT = 30.0  # seconds; every wait without its own deadline
MAX_TIMEOUT = 86400.0  # seconds; the longest wait that anybody may ask for: a day
DEFAULT_BUCKET_BYTES = 64 << 20


def check_known(key: str, known: list[str], what: str) -> None:
    """Raise a ``ConfigError`` naming the nearest known key when ``key`` is not one of them."""
    if key in known:
        return
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"unknown {what} {key!r}; {hint}")


def timeout_problem(seconds: Any) -> str | None:
    """What is wrong with a timeout that a user gave; None: nothing."""
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        if 0 < seconds <= MAX_TIMEOUT:
            return None
        seconds = f"{seconds:g}" if isinstance(seconds, float) else seconds
    shown = str(seconds) if isinstance(seconds, str) else repr(seconds)
    return f"must be a number of seconds above 0 and at most {MAX_TIMEOUT:g}, got {shown:.80}"


def check_timeout(seconds: Any) -> float:
    """A timeout as a request brings it; ``InvalidRequest`` unless it is in (0, MAX_TIMEOUT]."""
    problem = timeout_problem(seconds)
    if problem is not None:
        raise InvalidRequest(f"timeout {problem}")
    return float(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in bytes, times in seconds, lengths in tokens.

    ``model``: a directory or a hub id (with ``revision``). ``device`` auto | cpu | cuda.
    ``dtype`` auto (the checkpoint's) | float32 | bfloat16 | float16. ``executor`` auto | inline
    (this process, TP=1) | multiprocess. ``load_format`` auto | safetensors | pt | dummy.
    ``staging`` auto | device | host | none: where an uncommitted version waits. ``undo`` shadow |
    sparse | host: what a rollback goes back by once the shadow is overwritten; see ``engine/undo``.
    ``expert_parallel``: the ranks of a mixture-of-experts model hold whole experts, instead of a
    part of each. ``deterministic``: a sequence gets the same bits (tokens and all logprobs)
    whatever runs beside it and however it is cut, cached or preempted; see ``docs/benchmarks.md``
    for its cost. ``head_dtype`` auto (the model's) | float32: of the logits and of the sums that
    make them; the head's weights stay as they are. ``weight_layout`` auto | plain | tiles: how
    linear weights lie in memory. ``num_threads``: CPU threads of each rank, default cores divided
    by ranks. ``kv_cache_bytes``: of each rank, default on CPU min(4 GiB, a quarter of the free
    memory after the shadow is reserved). ``cuda_graphs`` auto | on | off (or a bool): capture
    decode steps on a GPU, padded to ``cuda_graph_sizes``, by default some up to ``max_num_seqs``.
    ``max_queued_requests``: sequences (n for each prompt) that may wait; a call that would make
    them more gets ``EngineOverloaded``, but where none waits any call is taken. ``seed``: of
    requests that bring none; None draws one at every start, so that no two engines sample alike.
    ``async_scheduling``: give the ranks step N+1 while N runs, as long as all running requests
    decode and none waits; what arrives, is aborted or commits may wait for two steps then.
    ``check_finite``: refuse updates whose weights hold NaN or infinity, warn of such checkpoints.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    executor: str = "auto"
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queued_requests: int = 16384
    block_size: int = 32
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    staging: str = "auto"
    undo: str = "shadow"
    weight_layout: str = "auto"
    deterministic: bool = False
    head_dtype: str = "auto"
    seed: int | None = None
    num_threads: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    start_timeout: float = 600.0
    weight_dirs: tuple[str, ...] = ()
    progress: bool = False
    cuda_graphs: str = "auto"
    cuda_graph_sizes: tuple[int, ...] = ()
    async_scheduling: bool = False
    check_finite: bool = True

    def __post_init__(self) -> None:
        def one_of(name: str, *allowed: str) -> None:
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

        if isinstance(self.cuda_graphs, bool):
            object.__setattr__(self, "cuda_graphs", "on" if self.cuda_graphs else "off")
        one_of("cuda_graphs", "auto", "on", "off")
        one_of("device", "auto", "cpu", "cuda")
        one_of("dtype", "auto", "float32", "bfloat16", "float16")
        one_of("load_format", "auto", "safetensors", "pt", "dummy")
        one_of("executor", "auto", "inline", "multiprocess")
        one_of("staging", "auto", "device", "host", "none")
        one_of("undo", "shadow", "sparse", "host")
        one_of("weight_layout", "auto", "plain", "tiles")
        one_of("head_dtype", "auto", "float32")
        positive = (
            *("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size"),
            "max_queued_requests",
        )
        optional = ("max_model_len", "num_kv_blocks", "kv_cache_bytes", "num_threads")
        for name in positive + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer or None, got {self.seed!r}")
        for name in ("timeout", "start_timeout"):
            if problem := timeout_problem(getattr(self, name)):
                raise ConfigError(f"{name} {problem}")
        if self.executor == "inline" and self.tensor_parallel_size > 1:
            raise ConfigError(
                "executor='inline' runs one rank; use executor='multiprocess' for "
                f"tensor_parallel_size={self.tensor_parallel_size}"
            )
        object.__setattr__(self, "weight_dirs", tuple(self.weight_dirs))
        sizes = tuple(sorted(set(self.cuda_graph_sizes)))
        if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
            raise ConfigError(f"cuda_graph_sizes must be positive integers, got {sizes}")
        object.__setattr__(self, "cuda_graph_sizes", sizes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; an unknown key is refused with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            check_known(key, known, "engine setting")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def resolved_executor(self) -> str:
        if self.executor != "auto":
            return self.executor
        return "inline" if self.tensor_parallel_size == 1 else "multiprocess"

    @property
    def resolved_num_threads(self) -> int:
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.tensor_parallel_size)

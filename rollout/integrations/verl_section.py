"""What of verl's rollout section the engine follows, and what it refuses."""

from __future__ import annotations

from typing import Any

from rollout.config import HEAD
from rollout.errors import ConfigError
from rollout.integrations.verl_checkpoint import NAME


def check_section(config: Any) -> None:
    """Refuses what no replica can be or do."""
    if (size := getattr(config, "data_parallel_size", 1)) > 1:  # verl passes DictConfigs, too
        raise ConfigError(
            f"rollout.data_parallel_size={size}: a replica of this engine holds one copy of the "
            "model; leave it at 1, and set tensor_model_parallel_size (times "
            "pipeline_model_parallel_size) to the GPUs that one copy needs: verl starts as many "
            "replicas as there are GPUs for"
        )
    mode = getattr(config, "logprobs_mode", None)
    if mode not in (None, "raw_logprobs", "processed_logprobs"):
        raise ConfigError(
            f"rollout.logprobs_mode={mode}: answers have logprobs, not logits; set "
            "processed_logprobs (of the distribution that is sampled) or raw_logprobs"
        )
    qat = getattr(config, "qat", None)
    if qat and qat.get("enable", False):
        raise ConfigError(
            "rollout.qat: the quantised weights that it trains for are not those of this engine; "
            "set the actor's qat.enable=False"
        )


def replica_ranks(config: Any) -> int:
    """How many workers of verl's have one replica."""
    stages: int = getattr(config, "pipeline_model_parallel_size", 1)
    return int(config.tensor_model_parallel_size) * stages


def engine_settings(config: Any, longest: int) -> dict[str, Any]:
    """``EngineConfig`` of verl's rollout section; ``engine_kwargs.rollout`` has the last word."""
    settings = {
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": getattr(config, "pipeline_model_parallel_size", 1),
        "expert_parallel": (config.expert_parallel_size or 1) > 1,
        "quantization": config.quantization,
        "dtype": config.dtype,
        "max_model_len": longest,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "load_format": config.load_format,
        "deterministic": config.full_determinism,
        "cuda_graphs": "off" if config.enforce_eager else None,
        "cuda_graph_sizes": tuple(config.cudagraph_capture_sizes or ()),
        **_drafts(getattr(config, "mtp", None)),
    }
    own = (config.engine_kwargs or {}).get(NAME) or {}
    return {key: value for key, value in {**settings, **own}.items() if value is not None}


def _drafts(mtp: Any) -> dict[str, Any]:
    """By the release's own head, which comes among the weights of a trainer that has it."""
    if not (mtp and mtp.get("enable", False) and mtp.get("enable_rollout", False)):
        return {}
    return {"draft_component": HEAD, "num_speculative_tokens": mtp.get("num_speculative_tokens", 1)}

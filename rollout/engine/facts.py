"""What decides the bits that an engine gives, beside its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from rollout.config import EngineConfig
from rollout.kernels.native import native_status
from rollout.wire.version import Speaks

# Settings that no bit depends on, or that say where things are.
_ELSEWHERE = frozenset({
    *("model", "revision", "tokenizer", "tokenizer_revision", "served_model_name", "journal"),
    *("journal_bytes", "weight_dirs", "timeout", "start_timeout", "progress", "executor", "seed"),
    *("undo", "components", "check_finite", "max_queued_requests", "staging", "max_staleness"),
    *("on_stale", "num_threads", "task", "trace_load", "max_parallel_loading_workers"),
    *("worker_extension_cls", "max_seqs_per_call", "pipeline_parallel_size"),
})  # fmt: skip
# What one layer computes depends on these, beside its weights, their dtype and the kernels.
_OF_LAYERS = frozenset({
    *("hf_overrides", "module_map", "head_dtype", "deterministic", "quantization"),
    *("kv_cache_dtype", "weight_layout", "max_model_len"),
})  # fmt: skip


def given_settings(config: EngineConfig) -> dict[str, Any]:
    """Those beside the defaults, as plain values."""
    given = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if value != (f.default if f.default_factory is MISSING else f.default_factory()):
            given[f.name] = dict(value) if isinstance(value, Mapping) else value
    return given


def layer_settings(config: EngineConfig) -> dict[str, Any]:
    """Those beside the defaults that whoever builds the same model elsewhere has to know."""
    return {name: v for name, v in given_settings(config).items() if name in _OF_LAYERS}


def engine_facts(
    config: EngineConfig, epoch: int, ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """JSON-able: software, dtype, device, ranks, kernels, and the settings beside the defaults.

    ``ranks``: their start replies.
    """
    return {
        "epoch": epoch,
        "software": Speaks.here().software,
        "dtype": str(ranks[0]["dtype"]),
        "device": str(ranks[0]["device"]),
        "tensor_parallel_size": config.tensor_parallel_size,
        "deterministic": config.deterministic,
        "kernels": native_status(),
        "num_threads": config.resolved_num_threads,
        "settings": given_settings(config),
    }


def differing_facts(
    then: Mapping[str, Any], now: Mapping[str, Any], without: Collection[str] = ()
) -> list[str]:
    """A line for each that may change bits: what it was, and what it is; ``without`` settings that
    were left out on purpose.
    """
    found = []
    fixed = then.get("deterministic") and now.get("deterministic")
    adapted = {"max_adapters"} & {*then.get("settings", {}), *now.get("settings", {})}
    for name in ("software", "dtype", "device", "tensor_parallel_size", "deterministic", "kernels"):
        if name == "tensor_parallel_size" and fixed and not adapted:
            continue  # any number of ranks gives these bits
        if then.get(name) != now.get(name):
            found.append(f"{name}: {then.get(name)} then, {now.get(name)} now")
    if not then.get("deterministic") and then.get("num_threads") != now.get("num_threads"):
        found.append(f"num_threads: {then.get('num_threads')} then, {now.get('num_threads')} now")
    was, are = dict(then.get("settings", {})), dict(now.get("settings", {}))
    for name in sorted({*was, *are} - _ELSEWHERE - set(now)):
        if name not in without and was.get(name) != are.get(name):
            found.append(f"{name}: {was.get(name, 'default')} then, {are.get(name, 'default')} now")
    return found

"""Architectures that run as transformers' own modules: what these cache, or why they cannot run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.transformers_backend.arguments import (
    cache_argument,
    first_position,
    position_arguments,
)
from rollout.models.transformers_backend.cache import Kept, what_is_kept
from rollout.models.transformers_backend.classes import load_class
from rollout.models.transformers_backend.construct import construct
from rollout.models.transformers_backend.interface import EAGER, KINDS, NAME, AttentionCall, bind
from rollout.models.transformers_backend.plan import NO_PLAN, cut, plan_of
from rollout.models.transformers_backend.remote_code import RemoteCode

UNBOUNDED = 1 << 20  # tokens, of models that have no positions
_BY_LENGTH = frozenset(("dynamic", "longrope"))  # ropes that are chosen anew in each pass
TOKENS = 5  # of the pass without memory that shows the shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A model of transformers, as far as serving it needs to know."""

    architecture: str
    values: Mapping[str, Any]  # of its config.json
    vocab_size: int
    hidden_size: int
    num_layers: int  # calls of attention
    num_heads: int
    num_kv_heads: int
    head_dim: int  # the largest, of keys or values
    max_position_embeddings: int
    tied: bool
    planned_by: str  # whose plan of tensor parallelism cuts it; "" where there is none
    calls: tuple[tuple[int, int, int], ...] = ()  # of attention: heads, KV heads, largest dim
    kept: tuple[Kept, ...] | None = None  # by modules that attend by themselves


def probe(
    values: Mapping[str, Any], architecture: str, file: str, code: RemoteCode | None = None
) -> Probed:
    """What attention needs in each layer; ``ConfigError`` says why a model cannot be served so.

    ``code``: leave to run the checkpoint's, where transformers has no such model.
    """
    kind, config = load_class(values, architecture, code, file)
    refuse(config, architecture)
    try:
        return _by_interface(kind, config, values, architecture)
    except ConfigError:  # it may still keep all it needs in transformers' own cache
        kind, config = load_class(values, architecture, code, file)
        return _by_cache(kind, config, values, architecture)


def probe_part(whole: Probed, ranks: int, code: RemoteCode | None) -> Probed:
    """What ``probe`` found, of the modules of one of ``ranks``, cut by their plan."""
    if not whole.planned_by:
        raise ConfigError(NO_PLAN)
    kind, config = load_class(whole.values, whole.architecture, code)
    found = _by_interface if whole.kept is None else _by_cache
    return found(kind, config, whole.values, whole.architecture, ranks)


def _by_interface(
    kind: type[Any], config: Any, values: Mapping[str, Any], architecture: str, ranks: int = 1
) -> Probed:
    refuse_interface(kind, config, architecture)
    model = _hollow(kind, config, architecture, NAME, ranks)
    seen, convolved = _Shapes(), list[nn.Module]()
    bind(model, seen)
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            module.register_forward_pre_hook(lambda module, args: convolved.append(module))
    _run_without_memory(model, architecture, use_cache=False)
    if convolved:
        raise ConfigError(f"{architecture}: convolutions over tokens need a state beside the cache")
    if not seen.calls:
        raise ConfigError(f"{architecture}: its attention does not go through the interface")
    return _probed(
        model,
        values,
        architecture,
        num_layers=len(seen.calls),
        num_heads=max(heads for heads, _, _ in seen.calls),
        num_kv_heads=max(kv_heads for _, kv_heads, _ in seen.calls),
        head_dim=max(dim for *_, dim in seen.calls),
        calls=tuple(seen.calls),
    )


def _by_cache(
    kind: type[Any], config: Any, values: Mapping[str, Any], architecture: str, ranks: int = 1
) -> Probed:
    """Of modules that attend by themselves: what they put into a cache of transformers'."""
    from transformers import DynamicCache

    if getattr(kind, "_is_stateful", False) and not getattr(config, "layer_types", None):
        raise ConfigError(f"{architecture}: it has states beside the KV cache")
    model = _hollow(kind, config, architecture, EAGER, ranks)
    try:
        cache = DynamicCache(config=config)
    except Exception as error:
        raise ConfigError(
            f"{architecture}: transformers has no cache for its layers ({str(error)[:200]})"
        ) from error
    _run_without_memory(model, architecture, use_cache=True, **{cache_argument(model): cache})
    try:
        kept = what_is_kept(cache)
    except ConfigError as error:
        raise ConfigError(f"{architecture}: {error}") from error
    if not kept:
        raise ConfigError(
            f"{architecture}: its attention goes neither through the interface nor through a cache"
        )
    heads = max(each.heads for each in kept)
    return _probed(
        model,
        values,
        architecture,
        num_layers=len(kept),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, *(dim for each in kept for dim in each.dims)),
        kept=kept,
    )


def _hollow(
    kind: type[Any], config: Any, architecture: str, attention: str, ranks: int
) -> nn.Module:
    meta = torch.device("meta")
    try:
        model = construct(kind, config, torch.float32, meta, attention)
    except Exception as error:
        raise ConfigError(
            f"{architecture}: its modules cannot be made of this config "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    if ranks > 1:
        cut(model, TensorParallel(0, ranks), meta)
    return model


def _run_without_memory(model: nn.Module, architecture: str, **how: Any) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(TOKENS)[None].to("meta")
    try:
        with torch.no_grad(), _NoValues():  # type: ignore[no-untyped-call]
            out = model(input_ids=ids, **position_arguments(model, positions), **how)
            vocabulary = out.logits.shape[-1]
    except Exception as error:
        raise ConfigError(
            f"{architecture}: its modules do not run without memory, which would tell what they "
            f"cache ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    whole: Any = model
    if vocabulary < whole.config.get_text_config().vocab_size:
        raise ConfigError(f"{architecture}: it gives logits of a part of the vocabulary")


def _probed(model: nn.Module, values: Mapping[str, Any], architecture: str, **found: Any) -> Probed:
    config: Any = model.config
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    return Probed(
        architecture=architecture,
        values=values,
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        max_position_embeddings=UNBOUNDED if longest is None else longest - first_position(model),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        planned_by=plan_of(model).by,
        **found,
    )


def refuse(config: Any, architecture: str) -> None:
    """Raise the ``ConfigError`` that a config alone justifies."""
    text = config.get_text_config()
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{architecture}: quantization_config is not supported")
    if lengthy := sorted(_BY_LENGTH & _rope_types(text)):
        raise ConfigError(
            f"{architecture}: rope of type {lengthy[0]!r} depends on a sequence's length, and its "
            "modules keep one for all sequences"
        )
    if config.model_type == "falcon" and config.alibi:  # seen in 5.23, in its eager form alone
        raise ConfigError(f"{architecture}: transformers adds its biases (alibi) twice")
    for name in ("vocab_size", "hidden_size"):
        if not isinstance(getattr(text, name, None), int):
            raise ConfigError(f"{architecture}: its config has no {name}")


def refuse_interface(kind: type[Any], config: Any, architecture: str) -> None:
    """Raise the ``ConfigError`` of what cannot run over pages alone."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or ()
    if other := [each for each in types if each not in KINDS]:
        raise ConfigError(f"{architecture}: layers of {other[0]!r} need more than a KV cache")
    if getattr(kind, "_is_stateful", False):
        raise ConfigError(f"{architecture}: it has states beside the KV cache")
    if not _uses_interface(kind):
        raise ConfigError(f"{architecture}: its attention does not go through the interface")
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise ConfigError(f"{architecture}: its config has no max_position_embeddings")


def _uses_interface(kind: type[Any]) -> bool:
    """Whether its file calls attention by name, or its class says so; what its modules do with
    that is judged after the first load.
    """
    if getattr(kind, "_supports_attention_backend", False):
        return True
    return hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")


def _rope_types(text: Any) -> set[str]:
    """Of all layers: one for the model, or one for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or {}
    rows = (row for row in (given, *given.values()) if isinstance(row, Mapping))
    return {str(row.get("rope_type", "default")) for row in rows}


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where modules look at values that tensors without memory lack (which experts have tokens):
    there are none, or 0; and what is split by such counts is the first part's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::nonzero" and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name in ("aten::index", "aten::index_put_") and args[0].is_meta:
            rows = [each for index in args[1] for each in _no_rows(index)]
            args = (args[0], rows, *args[2:])
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return 0
        if name == "aten::_to_copy" and args[0].is_meta and _device(kwargs) == "cpu":
            return torch.zeros(args[0].shape, dtype=(kwargs or {}).get("dtype") or args[0].dtype)
        if name == "aten::split_with_sizes" and args[0].is_meta and not any(args[1]):
            dim = args[2] if len(args) > 2 else 0
            args = (args[0], [args[0].shape[dim], *args[1][1:]], *args[2:])
        return func(*args, **(kwargs or {}))


def _device(kwargs: Any) -> str:
    device = (kwargs or {}).get("device")
    return "" if device is None else torch.device(device).type


def _no_rows(index: Tensor | None) -> list[Tensor | None]:
    """Of a mask, which takes none of what it is of: an index for each of its dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(0, dtype=torch.int64) for _ in index.shape]


class _Shapes:
    """Notes (heads, KV heads, largest dim) of every call."""

    positions: Tensor | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        _, heads, tokens, dim = call.query.shape
        values = call.value.shape[-1]
        self.calls.append((heads, call.key.shape[1], max(dim, values)))
        return call.query.new_empty(1, tokens, heads, values)

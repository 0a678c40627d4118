"""Architectures that run as transformers' own modules, with attention over our pages.

transformers' models call attention through one interface by name. Under ours, ``rollout``, the
modules of a model hand queries, keys and values to a ``Step``: one that notes their shapes (here),
or one that attends over pages (``transformers_lm.py``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.errors import ConfigError
from rollout.models.remote_code import MODEL, RemoteCode, auto_map
from rollout.models.transformers_cache import Kept, what_is_kept
from rollout.weights.names import weight_dtype

NAME = "rollout"
EAGER = "eager"
UNBOUNDED = 1 << 20  # tokens, of models that have no positions
KINDS = ("full_attention", "sliding_attention")
_BY_LENGTH = frozenset(("dynamic", "longrope"))  # ropes that are chosen anew in each pass
TOKENS = 5  # of the pass without memory that shows the shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one module asks for: [1, heads, T, dim] each; see ``paged_attention`` for the rest."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


class Step(Protocol):
    """Attention of one model's modules, in the order in which they call.

    ``positions``: [1, T] of the step; None where the modules count by themselves.
    """

    positions: Tensor | None

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, T, heads, dim of the values]."""
        ...


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
    kept: tuple[Kept, ...] | None = None  # by modules that attend by themselves


def probe(
    values: Mapping[str, Any], architecture: str, file: str, code: RemoteCode | None = None
) -> Probed:
    """What attention needs in each layer; ``ConfigError`` says why a model cannot be served so.

    ``code``: leave to run the checkpoint's, where transformers has no such model.
    """
    kind, config = _classes(values, architecture, file, code)
    refuse(config, architecture)
    try:
        return _by_interface(kind, config, values, architecture)
    except ConfigError:  # it may still keep all it needs in transformers' own cache
        kind, config = _classes(values, architecture, file, code)
        return _by_cache(kind, config, values, architecture)


def _by_interface(
    kind: type[Any], config: Any, values: Mapping[str, Any], architecture: str
) -> Probed:
    refuse_interface(kind, config, architecture)
    model = _hollow(kind, config, architecture, NAME)
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
    )


def _by_cache(kind: type[Any], config: Any, values: Mapping[str, Any], architecture: str) -> Probed:
    """Of modules that attend by themselves: what they put into a cache of transformers'."""
    from transformers import DynamicCache

    if getattr(kind, "_is_stateful", False) and not getattr(config, "layer_types", None):
        raise ConfigError(f"{architecture}: it has states beside the KV cache")
    model = _hollow(kind, config, architecture, EAGER)
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


def _hollow(kind: type[Any], config: Any, architecture: str, attention: str) -> nn.Module:
    try:
        return construct(kind, config, torch.float32, torch.device("meta"), attention)
    except Exception as error:
        raise ConfigError(
            f"{architecture}: its modules cannot be made of this config "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _run_without_memory(model: nn.Module, architecture: str, **how: Any) -> None:
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(TOKENS)[None].to("meta")
    try:
        with torch.no_grad(), _NoValues():  # type: ignore[no-untyped-call]
            model(input_ids=ids, **position_arguments(model, positions), **how)
    except Exception as error:
        raise ConfigError(
            f"{architecture}: its modules do not run without memory, which would tell what they "
            f"cache ({type(error).__name__}: {str(error)[:200]})"
        ) from error


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
        **found,
    )


def construct(
    kind: type[Any],
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = NAME,
) -> nn.Module:
    """The model with parameters that nobody has filled; what is computed of the config is there.

    ``attention``: the implementation, ours or their own.
    """
    from transformers.initialization import no_init_weights

    register()
    with torch.device(device), no_init_weights():
        model: Any = kind._from_config(config, attn_implementation=attention, dtype=dtype)
    model.tie_weights()
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # which reads all ids
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _unwarned
    if device.type == "meta" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the one whose shapes need no values
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(weight_dtype(name, dtype))
    done: nn.Module = model.eval()
    return done


def position_arguments(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """What tells ``model`` the positions [sequences, T] of its tokens; where it takes none, its
    modules that embed them are told (``bind``).
    """
    takes = _takes(model, "position_ids")
    if not takes and any(
        each.kind is inspect.Parameter.VAR_KEYWORD
        for each in inspect.signature(model.forward).parameters.values()
    ):  # handed on to a decoder within
        whole: Any = model
        inner = whole.get_decoder() if hasattr(model, "get_decoder") else model
        takes = _takes(inner, "position_ids")
    return {"position_ids": positions + first_position(model)} if takes else {}


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def cache_argument(model: nn.Module) -> str:
    """What ``model`` calls the cache that it is given."""
    return "cache_params" if _takes(model, "cache_params") else "past_key_values"


def first_position(model: nn.Module) -> int:
    """What a model's own count of positions begins with; past the padding's where it has one."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(getattr(module, "padding_idx", -1)) + 1
    return 0


def _unwarned(*args: Any) -> None:
    """There is no padding."""


def load_class(
    values: Mapping[str, Any], architecture: str, code: RemoteCode | None = None
) -> tuple[type[Any], Any]:
    """The class of an architecture that ``probe`` accepted, and its config."""
    return _classes(values, architecture, "config.json", code)


def bind(model: nn.Module, step: Step) -> None:
    """From now on the attention of ``model`` is what ``step`` makes of it.

    Modules that embed positions, and would count them from what their own cache has, are told
    those of the step, where it has some (``positions``, [1, T]).
    """
    for module in model.modules():
        module.__dict__["rollout_step"] = step
        embeds = "PositionalEmbedding" in type(module).__name__
        if embeds and "position_ids" in inspect.signature(module.forward).parameters:
            if "rollout_placed" not in module.__dict__:
                module.register_forward_pre_hook(_place, with_kwargs=True)
            module.__dict__["rollout_placed"] = True


def _place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    positions, given = module.__dict__["rollout_step"].positions, kwargs.get("position_ids")
    if positions is None:
        return args, kwargs
    if given is None:
        kwargs = {**kwargs, "position_ids": positions}
    elif given.dim() == 1:  # what the modules have counted: who is told positions has rows of them
        kwargs = {**kwargs, "position_ids": positions[0]}
    return args, kwargs


def register() -> None:
    """Make our interface known to transformers, under its name; again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, _interface)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What a module of transformers calls; positions and pages are the step's, not its own."""
    if (
        attention_mask is not None
        or rest.get("is_causal", getattr(module, "is_causal", True)) is False
    ):
        raise ConfigError(f"{type(module).__name__}: only causal attention is served")
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if sliding_window is None and types and index is not None and types[index] == KINDS[1]:
        sliding_window = getattr(config, "sliding_window", None)
    step: Step = module.__dict__["rollout_step"]
    out = step.attend(
        AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=int(sliding_window or 0),
            softcap=float(softcap or 0.0),
            sinks=s_aux,
        )
    )
    return out, None


def _classes(
    values: Mapping[str, Any], architecture: str, file: str, code: RemoteCode | None
) -> tuple[type[Any], Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture.endswith("ForSequenceClassification"):
        raise ConfigError(f"{architecture}: score heads are served over native decoders alone")
    kind = getattr(transformers, architecture, None)
    if kind is None or architecture not in _causal_names():
        if code is not None and auto_map(values):
            kind, config_kind = code.classes(values)
            return kind, config_kind.from_dict(dict(values))
        own = (
            f"; its own code lies with it ({auto_map(values)[MODEL]}), and is run with "
            "trust_remote_code=True alone"
            if MODEL in auto_map(values)
            else ""
        )
        raise ConfigError(
            f"{architecture}: transformers {transformers.__version__} has no such model{own}"
        )
    model_type = str(values.get("model_type") or kind.config_class.model_type)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"{file}: transformers knows no model_type {model_type!r}")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(_with_floats(values))
    except Exception as error:
        raise ConfigError(f"{file}: transformers refuses it: {str(error)[:300]}") from error
    return kind, config


def _with_floats(value: Any) -> Any:
    """JSON has no infinity; transformers writes one as an object."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _causal_names() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found = NAMES.values()
    return {each for names in found for each in ([names] if isinstance(names, str) else names)}


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
    there are none, or 0."""

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
        return func(*args, **(kwargs or {}))


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

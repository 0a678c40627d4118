"""Puts the engine's ops into the modules of a transformers model, and takes them out again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, InvalidRequest
from rollout.kernels import rms_norm, silu_mul
from rollout.kernels.linear import reads_tiles
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config import ModelConfig
from rollout.models.layers.base import Layer
from rollout.models.layers.embedding import VocabParallel
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.models.layers.norm import RMSNorm
from rollout.models.layers.rotary import Rotary
from rollout.trainer_ops.functions import linear, through
from rollout.trainer_ops.sequences import Sequences, number_sequences
from rollout.weights import PLAIN

INTERFACE = "rollout_deterministic"  # among transformers' attention functions
#: whose logprobs a test holds to the engine's, in float32 and bfloat16
SUPPORTED = (
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
INSTEAD = "Train it as it is, and correct for the difference by the importance ratio."
BY_LENGTH = ("dynamic", "longrope")  # rope that max_model_len changes

Forward = Callable[..., Any]


class Patch:
    """A model that runs the engine's ops, until ``remove`` or the end of a ``with`` block."""

    def __init__(self, model: Any, forwards: dict[nn.Module, Forward], prepare: Forward) -> None:
        self._model, self._replaced = model, list(forwards)
        self._own_attention = model.config._attn_implementation
        for module, forward in forwards.items():
            module.forward = forward
        model.set_attn_implementation(INTERFACE)
        self._hook = model.base_model.register_forward_pre_hook(prepare, with_kwargs=True)

    def remove(self) -> None:
        """The model has its own ops again; harmless where it was done before.

        Not between a forward pass with gradient checkpointing and its backward, which computes
        the forward again.
        """
        if not self._replaced:
            return
        while self._replaced:
            del self._replaced.pop().forward
        self._hook.remove()
        self._model.set_attn_implementation(self._own_attention)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    head_dtype: torch.dtype | None = None,
    weight_layout: str = "auto",
    max_model_len: int | None = None,
) -> Patch:
    """Let a transformers model compute its forward pass by the ops of ``deterministic=True``.

    ``model``: a dense decoder of ``SUPPORTED`` on a CPU, maybe within DDP; patch it before FSDP
    wraps it. Its modules, parameters and ``state_dict`` stay what they are: it is trained, wrapped,
    saved and sent by ``update_weights`` as before. The others: the engine's settings of these
    names; ``dtype`` is by default that of the parameters, and given where FSDP's mixed precision
    casts them. ``max_model_len``: longest sequence, by default the config's.

    Then equal weights give equal bits: logits of any engine with ``deterministic=True`` on a CPU of
    the same kind, on 1, 2 or 4 ranks, whatever batches are; take logprobs by ``token_logprobs`` or
    ``logprobs_of``. The model takes ids [samples, tokens] padded on either side (2-D
    ``attention_mask``), or packed (``position_ids`` that begin at 0 with each sequence); positions
    are counted where none are given. Gradients are those of the same formulas in plain torch at the
    forward's values; there is none of second order, no KV cache, and no ``torch.compile``.

    ``ConfigError`` names what of the model cannot be done; a call raises ``InvalidRequest``.
    """
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

    model = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"patch takes a causal language model of transformers, not a {type(model).__name__}: "
            "patch the model itself, before it is wrapped; merge adapters first"
        )
    config = _config_of(model)
    if config.layers[0].rope.kind in BY_LENGTH and max_model_len is None:
        raise ConfigError(
            f"rope of the kind {config.layers[0].rope.kind} depends on the engine's max_model_len: "
            "give the same here"
        )
    dtype = dtype or model.dtype
    if weight_layout == "auto":
        weight_layout = "tiles" if reads_tiles(torch.device("cpu"), dtype) else "plain"
    engine = build_model(
        config,
        TensorParallel(),
        dtype,
        "meta",
        weight_layout,
        max_model_len=max_model_len,
        deterministic=True,
        head_dtype=head_dtype,
    )
    assert isinstance(engine, CausalLM)
    rotary = _rotary_of(engine)
    found = {m: _forward_of(name, m, engine, rotary) for name, m in model.named_modules()}
    AttentionInterface.register(INTERFACE, _attention)
    forwards = {module: forward for module, forward in found.items() if forward is not None}
    return Patch(model, forwards, partial(_prepare, rotary))


def _config_of(model: Any) -> ModelConfig:
    """Raises a ``ConfigError`` where the model as a whole is none of those that can be patched."""
    name = next((c.__name__ for c in type(model).__mro__ if c.__name__ in SUPPORTED), None)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} cannot run the engine's ops: mixtures of experts, latent "
            "attention, layers with a state and other blocks are not done here, only "
            f"{', '.join(SUPPORTED)}. {INSTEAD}"
        )
    devices = {p.device.type for p in model.parameters()}
    if devices != {"cpu"}:
        raise ConfigError(
            f"parameters on {', '.join(sorted(devices))}: the ops of a trainer run on a CPU alone. "
            f"{INSTEAD}"
        )
    if model.config._attn_implementation == INTERFACE:
        raise ConfigError("the model is patched already: remove() that first")
    values = {**model.config.to_dict(), "architectures": [name]}
    config = ModelConfig.from_hf(values, file=f"the config of this {name}")
    if config.activation != "silu":
        raise ConfigError(
            f"{name} with hidden_act {config.activation}: silu alone is the engine's op. {INSTEAD}"
        )
    return config


def _rotary_of(engine: CausalLM) -> Rotary:
    """The engine's table, which has no memory on ``meta``."""
    config = engine.config
    assert set(engine.rotary_of) == {0}, "one table for all layers"
    return Rotary(
        config.layers[0].rope,
        config.head_dim,
        config.max_position_embeddings,
        engine.max_len,
        engine.build.dtype,
        torch.device("cpu"),
    )


def _forward_of(name: str, module: nn.Module, engine: CausalLM, rotary: Rotary) -> Forward | None:
    """What a module is to compute instead of its own; None where that may stay."""
    kind = type(module).__name__
    if kind.endswith("RotaryEmbedding"):
        return partial(_unturned, rotary.dim)
    if kind in ("SiLUActivation", "SiLU"):
        return _silu
    if isinstance(module, nn.Dropout) and module.p:
        raise ConfigError(f"{name} drops {module.p} of its inputs: set its rate to 0. {INSTEAD}")
    own = dict(module.named_parameters(recurse=False))
    if not own or type(module).forward is nn.Embedding.forward:
        return None
    source = engine.table.aliases.get(f"{name}.weight", f"{name}.weight")
    slots = engine.table.slots.get(source)
    layer = engine.get_submodule(slots[0].param.rpartition(".")[0]) if slots else None
    if isinstance(layer, RMSNorm):
        return partial(_norm, module, layer)
    if type(module).forward is nn.Linear.forward:
        if isinstance(layer, VocabParallel):
            return partial(_head, module, layer)
        if isinstance(layer, MergedColumnLinear | RowLinear):
            return partial(_linear, module, layer)
    raise ConfigError(
        f"{name}, a {kind}, is no module that runs the engine's ops: merge adapters, and leave out "
        f"quantisation. {INSTEAD}"
    )


def _unturned(dims: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos 1 and sin 0: q and k pass transformers' rotation as they are, for ``Sequences`` turns
    them by the engine's op, whose products and sums are fused."""
    return x.new_ones(1, 1, dims), x.new_zeros(1, 1, dims)


def _silu(x: Tensor) -> Tensor:
    """The op's own gate, times ones: torch's computes what fills no vector in another way."""

    def gated(x: Tensor) -> Tensor:
        return silu_mul(torch.cat((x, torch.ones_like(x)), dim=-1))

    return through(gated, torch.nn.functional.silu, x)


def _norm(module: Any, layer: RMSNorm, x: Tensor) -> Tensor:
    def by(op: Forward) -> Forward:
        return lambda x, weight: op(x, weight, layer.eps, layer.offset)

    return through(by(rms_norm), by(rms_norm.reference), x, module.weight)


def _linear(module: Any, layer: Layer, x: Tensor) -> Tensor:
    wanted = layer.build.dtype
    if not x.dtype == module.weight.dtype == wanted:
        raise InvalidRequest(
            f"a linear has {x.dtype} to multiply by {module.weight.dtype}, and the model was "
            f"patched for {wanted}: patch it for the dtype that both are in"
        )
    segments = layer.segments if isinstance(layer, RowLinear) else 1
    return linear(x, module.weight, module.bias, layer.specs["weight"].layout, segments)


def _head(module: Any, layer: VocabParallel, x: Tensor) -> Tensor:
    dtype = layer.build.head_dtype
    if dtype in (None, layer.build.dtype):
        return _linear(module, layer, x)
    return linear(x.to(dtype), module.weight.to(dtype), None, PLAIN)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    sequences: Sequences,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function; ``sequences``: what ``_prepare`` made of the mask."""
    if dropout:
        raise InvalidRequest(f"attention_dropout is {dropout}: set it to 0 in the model's config")
    return sequences.attend(query, key, value, scaling, sliding_window or 0), None


def _prepare(
    rotary: Rotary, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the decoder: its mask and positions become ``Sequences``, which transformers hands to
    every layer as it does any keyword."""
    if args:
        kwargs, args = {**kwargs, "input_ids": args[0]}, args[1:]
    if args or kwargs.get("past_key_values") is not None:
        raise InvalidRequest(
            "a patched model takes whole sequences, without a KV cache, and what is beside the ids "
            "by keyword: generate with the engine"
        )
    if torch.is_autocast_enabled("cpu"):
        raise InvalidRequest(
            "autocast chooses dtypes by op, the engine does not: leave it out, and load the model "
            "in the engine's dtype, or have FSDP's mixed precision cast it (patch(dtype=...))"
        )
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    like = ids if embeds is None else embeds[..., 0]
    if like is None:
        raise InvalidRequest("input_ids, or inputs_embeds, are needed")
    mask = kwargs.pop("attention_mask", None)
    numbers, positions = number_sequences(like, mask, kwargs.get("position_ids"), rotary.max_len)
    sequences = Sequences.of(numbers, positions, rotary)
    return args, {**kwargs, "sequences": sequences, "position_ids": positions, "use_cache": False}

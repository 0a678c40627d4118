"""Puts the engine's ops into the modules of a transformers model, and takes them out again."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, InvalidRequest
from rollout.kernels.linear import reads_tiles
from rollout.models.build import build_model
from rollout.models.causal_lm import CausalLM
from rollout.models.config.model import ModelConfig
from rollout.models.decoder.blocks import DecoderBlock
from rollout.models.layers.attention import Attention
from rollout.models.layers.rotary import Rotary
from rollout.trainer_ops.mixtures import forwards_of
from rollout.trainer_ops.modules import INSTEAD, Forward, forward_of
from rollout.trainer_ops.sequences import Layers, Sequences, number_sequences

INTERFACE = "rollout_deterministic"  # among transformers' attention functions
#: whose logprobs a test holds to the engine's, in float32 and bfloat16
SUPPORTED = (
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
)
ACTIVATIONS = ("silu", "gelu_tanh")
BY_LENGTH = ("dynamic", "longrope")  # rope that max_model_len changes


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
    expert_parallel: bool = False,
) -> Patch:
    """Let a transformers model compute its forward pass by the ops of ``deterministic=True``.

    ``model``: a decoder of ``SUPPORTED``, dense or a mixture, on a CPU, maybe within DDP; patch it
    before FSDP wraps it. Its modules, parameters and ``state_dict`` stay what they are: it is
    trained, wrapped, saved and sent by ``update_weights`` as before. The others: the engine's
    settings of these names; ``dtype`` is by default that of the parameters, and given where FSDP's
    mixed precision casts them. ``max_model_len``: longest sequence, by default the config's.

    Then equal weights give equal bits: logits of any engine with ``deterministic=True`` on a CPU of
    the same kind, on 1, 2 or 4 ranks, whatever batches are, unless its ``kv_cache_dtype`` rounds
    keys and values; take logprobs by ``token_logprobs`` or ``logprobs_of``. The model takes ids
    [samples, tokens] padded on either side (2-D ``attention_mask``), or packed (``position_ids``
    that begin at 0 with each sequence); positions are counted where none are given. Gradients are
    those of the same formulas in plain torch at the forward's values; there is none of second
    order, no KV cache, and no ``torch.compile``.

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
    by_length = [layer.rope.kind for layer in config.layers if layer.rope.kind in BY_LENGTH]
    if by_length and max_model_len is None:
        raise ConfigError(
            f"rope of the kind {by_length[0]} depends on the engine's max_model_len: "
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
        expert_parallel=expert_parallel,
        deterministic=True,
        head_dtype=head_dtype,
    )
    assert isinstance(engine, CausalLM)
    forwards = {} if config.moe is None else forwards_of(model, engine)
    for name, module in model.named_modules():
        if module not in forwards and (forward := forward_of(name, module, engine)):
            forwards[module] = forward
    AttentionInterface.register(INTERFACE, _attention)
    return Patch(model, forwards, partial(_prepare, _layers_of(engine)))


def _config_of(model: Any) -> ModelConfig:
    """Raises a ``ConfigError`` where the model as a whole is none of those that can be patched."""
    name = next((c.__name__ for c in type(model).__mro__ if c.__name__ in SUPPORTED), None)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} cannot run the engine's ops: latent attention, "
            "layers with a state, images and some other blocks are not done here, only "
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
    if config.activation not in ACTIVATIONS:
        raise ConfigError(
            f"{name} with hidden_act {config.activation}: silu and the tanh gelu alone are the "
            f"engine's ops. {INSTEAD}"
        )
    divides = config.arch.logits_scale is not None and config.arch.logits_scale.power == -1
    if divides and math.frexp(config.logits_scale)[0] != 0.5:
        raise ConfigError(
            f"logits_scaling {1 / config.logits_scale:g}: the engine multiplies by its reciprocal, "
            f"which is the same for powers of two alone. {INSTEAD}"
        )
    return config


def _layers_of(engine: CausalLM) -> Layers:
    """The engine's attention, and its rope tables, which have no memory on ``meta``."""
    config = engine.config
    blocks = [cast(DecoderBlock, block) for block in engine.model.layers]
    attentions = [cast(Attention, getattr(block, block.mixer_name)) for block in blocks]
    ropes = {at: layer.rope for at, layer in zip(engine.rotary_of, config.layers, strict=False)}
    rotaries = [
        Rotary(
            ropes[at],
            config.head_dim,
            config.max_position_embeddings,
            engine.max_len,
            torch.float32 if config.arch.wide_rope else engine.build.dtype,
            torch.device("cpu"),
        )
        for at in sorted(ropes)
    ]
    return Layers(attentions, rotaries, engine.rotary_of)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    sequences: Sequences,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function; ``sequences``: what ``_prepare`` made of the mask."""
    if dropout:
        raise InvalidRequest(f"attention_dropout is {dropout}: set it to 0 in the model's config")
    sinks = () if s_aux is None else (s_aux,)
    return sequences.attend(module.layer_idx, query, key, value, *sinks), None


def _prepare(
    layers: Layers, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
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
    numbers, positions = number_sequences(like, mask, kwargs.get("position_ids"), layers.max_len)
    sequences = Sequences.of(numbers, positions, layers)
    return args, {**kwargs, "sequences": sequences, "position_ids": positions, "use_cache": False}

"""Fields of a ``config.json`` that depend on each other, or on what the architecture declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import Arch
from rollout.models.config.delta import with_linear
from rollout.models.config.layer import LayerConfig
from rollout.models.config.mamba import with_kinds
from rollout.models.config.moe import MoEConfig, read_moe
from rollout.models.config.reader import Reader
from rollout.models.config.text import PREFIXES, text_config
from rollout.weights.files.packed_int import AWQ, COMPRESSED, GPTQ, refuse_turned
from rollout.wire.spellings import near

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
GEMMA = ("hidden_act", "gelu_pytorch_tanh")  # whose first releases call it "gelu"


def read_architectures(read: Reader) -> list[str]:
    """What the file names; of one that names none, what transformers has for its ``model_type``."""
    kind = read.values.get("model_type")
    if not read.values.get("architectures") and isinstance(kind, str):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        if name is not None:
            return [name] if isinstance(name, str) else [name[0]]
        if kind not in CONFIG_MAPPING_NAMES:
            meant = near(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            raise ConfigError(
                f"{read.file}: unknown model_type {kind!r:.80}, and no 'architectures'; "
                + (f"did you mean {meant!r}?" if meant else "name the architecture there")
            )
    return read.names("architectures")


def token_ids(value: Any, file: str, name: str = "eos_token_id") -> tuple[int, ...]:
    """``name`` as a tuple: None, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{file}: {name} must be an integer or a list, got {value!r}")
    return tuple(ids)


def text_reader(values: Mapping[str, Any], outer: Arch, file: str) -> tuple[Arch, Reader]:
    """The language model's declaration, and a reader of its fields under the names used here."""
    arch, values = text_config(values, outer, file)
    if arch.mamba is not None and not arch.mamba.beside:
        values = with_kinds(values, file)
    if arch.delta is not None and arch.delta.by_row:
        values = with_linear(values, file)
    called = {ours: theirs for ours, theirs in arch.fields.items() if theirs in values}
    given = {ours: values[theirs] for ours, theirs in called.items()}
    read = Reader({**values, **given}, file, called)
    _refuse_unsupported(read)
    return arch, read


def read_heads(read: Reader) -> tuple[int, int]:
    """(heads, KV heads) of attention."""
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{read.file}: num_attention_heads {heads} must be a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads


def read_experts(read: Reader, arch: Arch, layers: tuple[LayerConfig, ...]) -> MoEConfig | None:
    """None where no layer has experts."""
    if arch.moe is None or (arch.lone and not any(layer.feeds == "moe" for layer in layers)):
        return None
    moe = read_moe(read, arch.moe)
    if moe is not None and read.switch(arch.mlp_bias):
        raise ConfigError(f"{read.file}: mlp_bias does not go with experts here; set it to false")
    return moe


def read_prefixes(read: Reader, arch: Arch, nested: bool) -> Mapping[str, str]:
    """What checkpoints put before names; of layers that are not run here, "". ``nested``: the
    language model lies within another.
    """
    found = dict(PREFIXES) if nested else {}
    found |= arch.prefixes
    if arch.next_layers:
        first = read.count("num_hidden_layers")
        further = read.count(arch.next_layers, 0, least=0)
        found |= {f"model.layers.{n}.": "" for n in range(first, first + further)}
    return found


def read_activation(read: Reader, arch: Arch, moe: MoEConfig | None) -> str:
    """By the name that it has here."""
    name, default = arch.activation
    given = read.values.get(name) or default
    if (given, name, default) == ("gelu", *GEMMA):
        given = default
    if arch.squared and given != "relu2":
        raise ConfigError(f"{read.file}: {name} {given!r} is not relu2, which is all there is here")
    if arch.squared:
        return "relu2"
    if not isinstance(given, str) or given not in ACTIVATIONS:
        raise ConfigError(f"{read.file}: {name} {given!r} is not one of {', '.join(ACTIVATIONS)}")
    if ACTIVATIONS[given] != "silu" and (moe is not None or arch.delta is not None):
        what = "experts" if moe is not None else "linear attention"
        raise ConfigError(f"{read.file}: {name} {given!r} does not go with {what}: silu does")
    return ACTIVATIONS[given]


def read_head_dim(read: Reader, arch: Arch, heads: int) -> int:
    """Given, or the hidden size over the heads; even."""
    hidden = read.count("hidden_size")
    if not arch.head_dim_given and not read.values.get("head_dim") and hidden % heads:
        raise ConfigError(
            f"{read.file}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; "
            "set head_dim"
        )
    head_dim = read.count("head_dim", None if arch.head_dim_given else hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{read.file}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def refuse_bidirectional(read: Reader) -> None:
    """An encoder's tokens see later ones, too; transformers makes its masks by these fields."""
    for name, both_ways in (
        ("use_bidirectional_attention", (True, "all")),
        ("is_causal", (False,)),
    ):
        if (value := read.values.get(name)) in both_ways and value is not None:
            raise ConfigError(
                f"{read.file}: {name} is {json.dumps(value)}: its tokens see later ones, too, and "
                "here none does; use a model that generates"
            )


def _refuse_unsupported(read: Reader) -> None:
    values = read.values
    if values.get("clip_qkv") is not None:
        raise ConfigError(f"{read.file}: clip_qkv is not supported; use a checkpoint without it")
    refuse_bidirectional(read)
    packed = values.get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, Mapping) else None
    if packed and method not in ("mxfp4", "fp8", COMPRESSED, GPTQ, AWQ):
        raise ConfigError(
            f"{read.file}: quantization_config is not supported, but for fp8 weights, mxfp4 "
            "experts, GPTQ, AWQ and compressed-tensors in 8 bits or packed; its quant_method is "
            f"{method!r}: use an unquantised checkpoint"
        )
    if isinstance(packed, Mapping):
        refuse_turned(packed, read.file)

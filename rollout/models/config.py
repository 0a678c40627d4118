"""What a checkpoint's ``config.json`` says about a model; the only reader of its attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rollout.errors import ConfigError
from rollout.models.arch import Arch
from rollout.models.config_reader import Reader
from rollout.models.latent_config import LatentConfig, read_latent
from rollout.models.moe_config import MoEConfig, read_moe
from rollout.models.registry import Registry

# How positions may be scaled -> what the file must say then.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary parameters, from either form of ``config.json``.

    ``partial`` is the rotated share of a head. ``scaling``: the parameters of a kind other than
    "default", under transformers' names.
    """

    kind: str
    theta: float
    partial: float = 1.0
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder. ``dtype`` is the checkpoint's, not the engine's.

    ``sliding_window``: how far attention reaches back in the checkpoint; here it always reaches
    back to the start, which is the same in sequences that are no longer. ``next_layers``: layers
    behind the last one that a checkpoint may hold, for a purpose that is none here.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    sliding_window: int | None = None
    next_layers: int = 0

    @classmethod
    def from_hf(
        cls,
        values: Mapping[str, Any],
        *,
        file: str = "config.json",
        registry: Registry | None = None,
    ) -> Self:
        """Read the plain dict of a ``config.json``; ``file`` only names it in errors.

        Raises ``ConfigError`` for an unsupported architecture, a missing or malformed field, and
        for what these models cannot do: layers that slide, activations other than silu.
        """
        read = Reader(values, file)
        registry = registry or Registry()
        architecture = registry.choose(read.names("architectures"))
        arch = registry.arch(architecture)
        _refuse_unsupported(read, architecture)
        heads = read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{file}: num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        rope = _read_rope(read, arch)
        latent = None if arch.latent is None else read_latent(read, arch.latent, rope.scaling)
        slides = arch.always_slides and values.get("sliding_window", arch.sliding_window)
        return cls(
            architecture=architecture,
            vocab_size=read.count("vocab_size"),
            hidden_size=read.count("hidden_size"),
            intermediate_size=read.count("intermediate_size"),
            num_layers=read.count("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=latent.rope_dim if latent else _read_head_dim(read, arch, heads),
            rms_norm_eps=read.number("rms_norm_eps"),
            max_position_embeddings=read.count("max_position_embeddings"),
            rope=rope,
            tied=read.flag("tie_word_embeddings"),
            qkv_bias=read.switch(arch.qkv_bias),
            o_bias=read.switch(arch.o_bias),
            mlp_bias=read.switch(arch.mlp_bias),
            qk_norm=read.switch(arch.qk_norm),
            dtype=read.dtype(),
            eos_token_ids=token_ids(values.get("eos_token_id"), file),
            bos_token_id=values.get("bos_token_id"),
            latent=latent,
            moe=None if arch.moe is None else read_moe(read, arch.moe),
            sliding_window=read.count("sliding_window", arch.sliding_window) if slides else None,
            next_layers=read.count(arch.next_layers, 0, least=0) if arch.next_layers else 0,
        )

    @classmethod
    def from_directory(cls, path: str | Path, registry: Registry | None = None) -> Self:
        """Read ``config.json`` of a checkpoint directory, without touching the network.

        End-of-sequence ids of a ``generation_config.json`` join those of the config; nothing else
        of that file is used.
        """
        file = Path(path) / "config.json"
        config = cls.from_hf(_read_json(file), file=str(file), registry=registry)
        extra_file = Path(path) / "generation_config.json"
        if not extra_file.is_file():
            return config
        extra = token_ids(_read_json(extra_file).get("eos_token_id"), str(extra_file))
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra))))

    def cached_heads(self, size: int) -> tuple[int, int, int]:
        """What a rank of ``size`` keeps of a token in each layer: (tensors, heads, their elements).

        Keys and values; or, of latent attention, one vector that is both, whole on every rank.
        """
        if self.latent is not None:
            return 1, 1, self.latent.cached
        return 2, max(1, self.num_kv_heads // size), self.head_dim

    def check_length(self, max_len: int) -> None:
        """Raise ``ConfigError`` where a sequence of ``max_len`` tokens outgrows the window."""
        if self.sliding_window is not None and max_len > self.sliding_window:
            raise ConfigError(
                f"sliding_window {self.sliding_window} is set, but {self.architecture} runs full "
                f"attention only here, over up to {max_len} tokens; set max_model_len to at most "
                f"{self.sliding_window}, or choose another checkpoint"
            )

    def check_tensor_parallel(self, size: int, expert_parallel: bool = False) -> None:
        """Raise ``ConfigError`` unless this model divides over ``size`` ranks.

        KV heads divide, or are replicated when ``size`` is a multiple of them; the vocabulary is
        padded and always divides. With ``expert_parallel`` whole experts are dealt out instead of
        a part of each: any number of them that leaves no rank without one.
        """
        self._check_experts(size, expert_parallel)
        if self.num_heads % size:
            raise ConfigError(
                f"Total number of attention heads ({self.num_heads}) must be divisible by "
                f"tensor parallel size ({size})."
            )
        if self.latent is None and self.num_kv_heads % size and size % self.num_kv_heads:
            raise ConfigError(
                f"Number of key/value heads ({self.num_kv_heads}) must be divisible by tensor "
                f"parallel size ({size}), or divide it (they are then replicated)."
            )
        if self._has_dense_layers and self.intermediate_size % size:
            raise ConfigError(
                f"Intermediate size ({self.intermediate_size}) must be divisible by tensor "
                f"parallel size ({size})."
            )

    @property
    def _has_dense_layers(self) -> bool:
        moe = self.moe
        return moe is None or not all(moe.is_sparse(layer) for layer in range(self.num_layers))

    def _check_experts(self, size: int, expert_parallel: bool) -> None:
        moe = self.moe
        if moe is None:
            if expert_parallel:
                raise ConfigError(f"{self.architecture} has no experts; unset expert_parallel")
            return
        if expert_parallel and moe.num_experts < size:
            raise ConfigError(
                f"{moe.num_experts} experts cannot be dealt out to {size} ranks; unset "
                "expert_parallel, or use fewer ranks"
            )
        sizes = {"Shared expert": moe.shared_size, "Expert": moe.expert_size}
        if expert_parallel:
            del sizes["Expert"]
        for what, inner in sizes.items():
            if inner % size:
                raise ConfigError(
                    f"{what} intermediate size ({inner}) must be divisible by tensor parallel "
                    f"size ({size})" + ("" if what[0] == "S" else ", or set expert_parallel")
                )


def token_ids(value: Any, file: str) -> tuple[int, ...]:
    """``eos_token_id`` as a tuple: None, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{file}: eos_token_id must be an integer or a list, got {value!r}")
    return tuple(ids)


def _refuse_unsupported(read: Reader, architecture: str) -> None:
    values = read.values
    if (act := values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ConfigError(f"{read.file}: hidden_act {act!r} is not supported, only 'silu'")
    if values.get("use_sliding_window") and values.get("sliding_window"):
        layers, first = values.get("num_hidden_layers", 0), values.get("max_window_layers", 0)
        types = values.get("layer_types")
        used = "sliding_attention" in types if types else first < layers
        if used:
            raise ConfigError(
                f"{read.file}: use_sliding_window is true, but {architecture} runs full attention "
                "only here; set use_sliding_window to false or choose another checkpoint"
            )
    types, layers = values.get("layer_types"), values.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(layers, int) and len(types) != layers:
        raise ConfigError(
            f"{read.file}: num_hidden_layers is {layers}, but layer_types names {len(types)} "
            "layers; make them agree"
        )
    packed = values.get("quantization_config")
    if packed and not (isinstance(packed, Mapping) and packed.get("quant_method") == "mxfp4"):
        raise ConfigError(
            f"{read.file}: quantization_config is not supported, but for mxfp4 experts; use an "
            "unquantised checkpoint"
        )


def _read_head_dim(read: Reader, arch: Arch, heads: int) -> int:
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


def _read_rope(read: Reader, arch: Arch) -> RopeConfig:
    """Both forms: ``rope_parameters``, or ``rope_scaling`` beside ``rope_theta``."""
    values, file = read.values, read.file
    given: dict[str, Any] = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if any(isinstance(v, Mapping) for v in given.values()):
        raise ConfigError(f"{file}: rope parameters per layer type are not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_NEEDS:
        raise ConfigError(f"{file}: rope_type {kind!r} is not one of {', '.join(ROPE_NEEDS)}")
    for name in ROPE_NEEDS[kind]:
        if given.get(name) is None:
            raise ConfigError(f"{file}: field {name!r} is missing; rope_type {kind!r} needs it")
    theta = float(given.pop("rope_theta", None) or values.get("rope_theta") or arch.rope_theta)
    partial = given.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else float(partial)
    if kind == "default":
        # transformers ignores the factor for most architectures' unscaled rotary; so do we.
        return RopeConfig(kind=kind, theta=theta, partial=partial if arch.partial_rotary else 1.0)
    # A top-level value wins over the one inside, as in transformers.
    own = values.get("original_max_position_embeddings")
    own = own or given.get("original_max_position_embeddings")
    given["original_max_position_embeddings"] = own or read.count("max_position_embeddings")
    scaling = {name: given[name] for name in sorted(given) if name not in ("type", "rope_type")}
    if wrong := [name for name, value in scaling.items() if isinstance(value, str)]:
        raise ConfigError(f"{file}: {wrong[0]} must be a number, got {scaling[wrong[0]]!r}")
    return RopeConfig(kind=kind, theta=theta, partial=partial, scaling=scaling)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} does not exist; point `model` at a checkpoint directory"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return values

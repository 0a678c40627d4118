"""Where Megatron-Core's parameters lie in a checkpoint's tensors: what it calls them.

What attention and delta nets fuse has an order of rows of its own (``megatron_fused``),
``linear_fc1`` is this rank's rows of gate, then of up; vocabularies are padded; what predicts
further tokens is the component ``mtp``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rollout.config import HEAD
from rollout.errors import ConfigError, WeightMismatch, some
from rollout.integrations.megatron_fused import delta_heads, fused, query_groups
from rollout.integrations.megatron_parts import (
    Part,
    Place,
    cut,
    gated_mlp,
    rows_from,
    whole,
)
from rollout.weight_sync.trainer.sources.names import named_weights
from rollout.weight_sync.trainer.sources.values import check_all, is_dtensor
from rollout.weights.components import qualified
from rollout.weights.expert_names import PROJ_NAMES, W123_NAMES

# Delta nets beside attention whose output is gated, and norms that are added to one.
_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", *_HYBRIDS),
)
_SEE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # images too: of their text
# Routers have a bias on the choice, and layers that predict further tokens may come behind.
_OF_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")

_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
# Of latent attention, in the place of norms of queries and keys.
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}
_LATENT = {
    "self_attention.linear_q_proj.weight": "q_proj",
    "self_attention.linear_q_down_proj.weight": "q_a_proj",
    "self_attention.linear_q_up_proj.weight": "q_b_proj",
    "self_attention.linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj.weight": "kv_b_proj",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Around the layer of a head of multi-token prediction, which Megatron has called both.
_HEAD = re.compile(r"mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_AROUND = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_AROUND_IN_QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "final_layernorm.weight": "norm.weight",
}
_DELTA_NET = {
    "self_attention.in_proj.weight": "in_proj",
    "self_attention.conv1d.weight": "conv1d",
    "self_attention.A_log": "A_log",
    "self_attention.dt_bias": "dt_bias",
    "self_attention.out_norm.weight": "norm.weight",
    "self_attention.out_proj.weight": "out_proj.weight",
}
_ADDED = "layernorm_zero_centered_gamma"
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))"
)
_HEADS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Where one rank's parameters lie in the file-form tensors of one architecture."""

    config: Mapping[str, Any]
    tp: Place
    pp: Place
    ep: Place
    etp: Place

    @classmethod
    def of(cls, config: Any, places: Mapping[str, Place | None], alone: bool) -> MegatronLayout:
        """``places`` as given, else from ``parallel_state``, else of one rank ``alone``."""
        plain = dict(config if isinstance(config, Mapping) else config.to_dict())
        if plain.get("model_type") in _SEE and isinstance(
            text := plain.get("text_config"), Mapping
        ):
            tied = plain.get("tie_word_embeddings", text.get("tie_word_embeddings"))
            plain = {"model_type": _SEE[plain["model_type"]], **text, "tie_word_embeddings": tied}
        if plain.get("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"model_type {plain.get('model_type')!r}: Megatron's names are known for "
                f"{', '.join(MODEL_TYPES)}; other models need a source of their own"
            )
        known = {**_parallel_state(), **{k: v for k, v in places.items() if v is not None}}
        if alone:
            known = {**dict.fromkeys(("tp", "pp", "ep"), (0, 1)), **known}
        if "tp" in known:
            known.setdefault("etp", known["tp"])
        if missing := [axis for axis in places if axis not in known]:
            raise ConfigError(
                f"{', '.join(missing)}: Megatron's parallel_state is not initialised in this "
                "process; pass (rank, size) of each"
            )
        for axis, (rank, size) in known.items():
            if not 0 <= rank < size:
                raise ConfigError(f"{axis}=({rank}, {size}) is not (rank, size)")
        return cls(config=plain, **known)

    def parts(self, chunks: Sequence[nn.Module], mtp: bool = True) -> list[Part]:
        """Every parameter of this rank; raises one ``WeightMismatch`` with all that is unknown.

        ``mtp``: whether those of heads that predict further tokens are among them.
        """
        found: list[Part] = []
        unknown: list[str] = []
        for index, wrapped in enumerate(chunks):
            chunk = _unwrapped(wrapped)
            self._check(chunk)
            number = self._numbering(chunk, index, len(chunks))
            items = named_weights(chunk)
            check_all(items)
            _refuse_spread(items)
            for name, tensor in items:
                if name.startswith("mtp.") and not mtp:
                    continue
                values = tensor.detach()
                if name.endswith(".self_attention.out_norm.weight"):  # files have this one whole
                    norm = chunk.get_submodule(name.removesuffix(".weight"))
                    values = values if _adds_one(norm) is False else 1 + values.float()
                parts = self._parts_of(name, values, number)
                if parts is None:
                    unknown.append(name)
                found += parts or ()
        if unknown:
            further = any(name.startswith("mtp.") for name in unknown)
            raise WeightMismatch(
                f"nothing was sent: no rule says what {some(unknown)} of the Megatron model "
                f"are in a checkpoint of {self._kind!r}"
                + ("; mtp=False leaves out what predicts further tokens" if further else ""),
                problems=unknown,
            )
        return found

    def _check(self, chunk: nn.Module) -> None:
        """Refuse what would be sent wrongly under the right name."""
        settings = getattr(chunk, "config", None)
        for field in (
            "rotary_interleaved",  # rows of queries and keys in another order than files have
            "moe_mlp_glu_interleave_size",  # blocks of gate and up in turns
        ):
            if getattr(settings, field, None):
                raise ConfigError(f"Megatron's {field}: such weights cannot be sent yet")
        for field, of_files in (
            (_ADDED, "weights of norms that are added to one"),
            ("attention_output_gate", "gates of attention's output"),
        ):
            if (told := bool(getattr(settings, field, False))) != self._hybrid:
                raise ConfigError(
                    f"Megatron's {field}={told}: checkpoints of {self._kind!r} have "
                    f"{'' if self._hybrid else 'no '}{of_files}"
                )
        for name, module in chunk.named_modules():
            adds = _adds_one(module)
            if adds not in (None, self._hybrid) and not name.endswith(".out_norm"):
                raise ConfigError(
                    f"Megatron's {name} {'adds' if adds else 'does not add'} its weight to one, "
                    f"and {_ADDED} is {self._hybrid}"
                )
        shared = getattr(chunk, "share_embeddings_and_output_weights", None)
        if shared is not None and shared != self._tied:
            raise ConfigError(
                f"the model has share_embeddings_and_output_weights={shared} and the configuration "
                f"tie_word_embeddings={self._tied}"
            )

    @property
    def _kind(self) -> str:
        return str(self.config["model_type"])

    @property
    def _hybrid(self) -> bool:
        return self._kind in _HYBRIDS

    @property
    def _tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def _numbering(self, chunk: nn.Module, index: int, chunks: int) -> Callable[[int], int]:
        """From a layer's index in this chunk to its index in the model.

        By Megatron's own ``layer_number``, which knows uneven stages; without one, evenly.
        """
        layers: Any = getattr(getattr(chunk, "decoder", None), "layers", ())
        numbers: list[Any] = [getattr(layer, "layer_number", None) for layer in layers]
        if None not in numbers:
            return lambda layer: int(numbers[layer]) - 1
        (rank, size), total = self.pp, int(self.config["num_hidden_layers"])
        each, rest = divmod(total, size * chunks)
        if rest:
            raise ConfigError(
                f"{total} layers over {size} stages of {chunks} chunks are not even, and the "
                "model's layers have no layer_number"
            )
        return lambda layer: (index * size + rank) * each + layer

    def _parts_of(
        self, name: str, tensor: Tensor, number: Callable[[int], int]
    ) -> list[Part] | None:
        """The boxes of one parameter; None where no rule knows it."""
        if name in _HEADS:
            sent = name != "output_layer.weight" or not self._tied
            return self._vocabulary(_HEADS[name], tensor) if sent else []
        if name == "decoder.final_layernorm.weight":
            return [whole("model.norm.weight", tensor)]
        if (match := _LAYER.fullmatch(name)) is not None:
            return self._layer(f"model.layers.{number(int(match[1]))}", match[2], tensor)
        if (match := _HEAD.fullmatch(name)) is None:
            return None
        found = self._head(int(match[1]), match[2], tensor)
        return found and [replace(part, name=qualified(HEAD, part.name)) for part in found]

    def _head(self, index: int, rest: str, tensor: Tensor) -> list[Part] | None:
        """As files of DeepSeek-V3 and GLM-4.5 have it: behind the last layer; or Qwen's: beside
        the model, one head at most.
        """
        if self._hybrid and index == 0:
            layer, beside, around = "mtp.layers.0", "mtp", _AROUND_IN_QWEN
        elif self._kind in _OF_DEEPSEEK_V3:
            layer = beside = f"model.layers.{int(self.config['num_hidden_layers']) + index}"
            around = _AROUND
        else:
            return None
        if rest == "eh_proj.weight":
            return [cut(f"{beside}.{around[rest]}", tensor, 0, self.tp)]
        if rest in around:
            return [whole(f"{beside}.{around[rest]}", tensor)]
        return self._layer(layer, rest, tensor)

    def _layer(self, layer: str, rest: str, tensor: Tensor) -> list[Part] | None:
        latent = "kv_lora_rank" in self.config
        if latent and rest in _LATENT_NORMS:
            return [whole(f"{layer}.{_LATENT_NORMS[rest]}", tensor)]
        if latent and rest in _LATENT:
            return [self._latent(f"{layer}.self_attn.{_LATENT[rest]}.weight", tensor)]
        if rest in _REPLICATED:
            return [whole(f"{layer}.{_REPLICATED[rest]}", tensor)]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            module, kind = f"{layer}.self_attn", rest.rsplit(".", 1)[1]
            runs = query_groups(self.config, module, kind, gated=self._hybrid)
            return fused(f"linear_qkv of {module}", runs, tensor, self.tp)
        if rest == "self_attention.linear_proj.weight":
            return [cut(f"{layer}.self_attn.o_proj.weight", tensor, 1, self.tp)]
        if self._hybrid and rest in _DELTA_NET:
            return self._delta_net(f"{layer}.linear_attn", _DELTA_NET[rest], tensor)
        linear = re.fullmatch(r"mlp\.linear_fc([12])\.weight", rest)
        if linear is not None:
            return gated_mlp(f"{layer}.mlp", PROJ_NAMES.linears, linear[1], tensor, self.tp)
        return self._experts(layer, rest, tensor)

    def _vocabulary(self, name: str, tensor: Tensor) -> list[Part]:
        """This rank's rows without padding, which only the last ranks have."""
        (rank, size), total = self.tp, int(self.config["vocab_size"])
        rows, *rest = tensor.shape
        if rows * size < total:
            raise WeightMismatch(
                f"{name} has {rows} rows on each of {size} tensor-parallel ranks, and the "
                f"vocabulary {total}"
            )
        start, stop = rank * rows, min((rank + 1) * rows, total)
        if start >= stop:
            return []
        return [rows_from(name, (total, *rest), start, tensor[: stop - start])]

    def _delta_net(self, module: str, name: str, tensor: Tensor) -> list[Part]:
        if name == "norm.weight":
            return [whole(f"{module}.{name}", tensor)]
        if name not in ("in_proj", "conv1d"):
            return [cut(f"{module}.{name}", tensor, 1 if "out_proj" in name else 0, self.tp)]
        by_head = self._kind == "qwen3_next"
        runs = delta_heads(self.config, module, name, by_head, self.tp)
        return fused(f"{name} of {module}", runs, tensor, (0, 1))

    def _latent(self, name: str, tensor: Tensor) -> Part:
        """This rank's rows; of what leads into the latent space all of them, or its rows."""
        config = self.config
        into = {
            "q_a_proj": config.get("q_lora_rank"),
            "kv_a_proj_with_mqa": int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]),
        }
        if len(tensor) == into.get(name.split(".")[-2]):
            return whole(name, tensor)
        return cut(name, tensor, 0, self.tp)

    def _experts(self, layer: str, rest: str, tensor: Tensor) -> list[Part] | None:
        """A router, the expert that every token passes, or one expert's linear: of
        ``local_experts``, or grouped (``weight3``).
        """
        kind, like_qwen2 = self._kind, self._hybrid or self._kind == "qwen2_moe"
        names = W123_NAMES if kind == "mixtral" else PROJ_NAMES
        if rest == "mlp.router.weight":
            return [whole(f"{layer}.{names.module}.gate.weight", tensor)]
        if rest == "mlp.router.expert_bias" and kind in _OF_DEEPSEEK_V3:
            return [whole(f"{layer}.{names.module}.gate.e_score_correction_bias", tensor)]
        if rest == "mlp.shared_experts.gate_weight" and like_qwen2:
            return [whole(f"{layer}.mlp.shared_expert_gate.weight", tensor)]
        shared = re.fullmatch(r"mlp\.shared_experts\.linear_fc([12])\.weight", rest)
        if shared is not None:
            module = "shared_expert" if like_qwen2 else "shared_experts"
            return gated_mlp(f"{layer}.mlp.{module}", names.linears, shared[1], tensor, self.tp)
        if (match := _EXPERT.fullmatch(rest)) is None:
            return None
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        total = next((int(n) for field in counts if (n := self.config.get(field))), 0)
        here, left = divmod(total, self.ep[1])
        local = int(match[1] or match[4])
        if left or local >= here:
            raise WeightMismatch(
                f"{rest}: {total} experts over {self.ep[1]} expert-parallel ranks are {here} each"
            )
        module = f"{layer}.{names.module}.experts.{self.ep[0] * here + local}"
        return gated_mlp(module, names.linears, match[2] or match[3], tensor, self.etp)


def _refuse_spread(items: Sequence[tuple[str, Tensor]]) -> None:
    """Of an FSDP's parameter this rank has rows, or a piece of its memory, that no rule knows."""
    if spread := [name for name, tensor in items if is_dtensor(tensor)]:
        raise WeightMismatch(
            f"nothing was sent: {some(spread)} of the Megatron model are DTensors, as "
            "Megatron-FSDP and torch's FSDP make them, and are not read here; pass pairs of the "
            "checkpoint's names and full_tensor() instead",
            problems=spread,
        )


def _adds_one(module: nn.Module) -> bool | None:
    """Whether a norm adds its weight to one, as it says itself; None where it says nothing."""
    told: bool | None = getattr(module, "zero_centered_gamma", None)
    return False if told is None and isinstance(module, nn.RMSNorm | nn.LayerNorm) else told


def _unwrapped(module: nn.Module) -> nn.Module:
    """The ``GPTModel`` beneath Float16Module, Megatron's or torch's DDP."""
    while not hasattr(module, "decoder") and isinstance(
        inner := getattr(module, "module", None), nn.Module
    ):
        if getattr(module, "remove_forward_pre_hook_handles", None):
            raise ConfigError(
                "Megatron's overlap_param_gather: what other data-parallel ranks have stepped "
                "comes with the next forward, and is older until then; call each model chunk's "
                "disable_forward_pre_hook(), which gathers it, on every rank before the update, "
                "and enable_forward_pre_hook() after it"
            )
        module = inner
    return module


def _parallel_state() -> dict[str, Place]:
    """This rank's places as Megatron has initialised them; empty where it has not."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    axes = {
        "tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"
    }  # fmt: skip
    return {
        axis: (
            int(getattr(state, f"get_{word}_parallel_rank")()),
            int(getattr(state, f"get_{word}_parallel_world_size")()),
        )
        for axis, word in axes.items()
    }

"""Megatron-Core: tensor-, pipeline- and expert-parallel shards, sent from where they lie.

Each parameter of a ``GPTModel`` is read as views that are boxes of the checkpoint's tensors: no
rank needs more than its shard, and nothing is converted. ``linear_qkv`` interleaves rows by query
group (its queries, its key, its value), ``linear_fc1`` is this rank's rows of gate, then of up;
vocabularies are padded; what predicts further tokens is the component ``mtp``. Data- and context-
parallel replicas hold the same boxes, each of which travels once. Megatron is not imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.config import DEFAULT_TIMEOUT, HEAD
from rollout.errors import ConfigError, WeightMismatch, some
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.reshard_plan import gap
from rollout.weight_sync.trainer.sources.names import named_weights
from rollout.weight_sync.trainer.sources.values import check_all, is_dtensor
from rollout.weights import Box, Shape, TensorMeta
from rollout.weights.components import POLICY, component_of, qualified
from rollout.weights.expert_names import PROJ_NAMES, W123_NAMES
from rollout.wire.codec import from_plain, to_plain

Place = tuple[int, int]  # (rank, size) along one kind of parallelism
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
)
# Routers have a bias on the choice, and layers that predict further tokens may come behind.
_OF_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")

_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
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
    "final_layernorm.weight": "shared_head.norm.weight",
}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))"
)
_HEADS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a file-form tensor of ``shape``, and its values: a view of this rank's memory."""

    name: str
    shape: Shape
    box: Box
    values: Tensor


class MegatronSource:
    """The weights of a Megatron-Core ``GPTModel`` as its ranks hold them: a ``LocalSource``.

    ``model_chunks``: this rank's model, or its list of virtual pipeline chunks, in Megatron's or
    torch's wrappers. ``config``: the checkpoint's Hugging Face configuration (of ``MODEL_TYPES``),
    or its dict. ``tp``, ``pp``, ``ep`` and ``etp`` (expert tensor parallelism; as ``tp`` unless
    given): (rank, size) each, read from Megatron's ``parallel_state`` where it is initialised.
    ``group``: the torch group of all ranks that hold the model, the sender first; the default group
    unless given. ``mtp``: whether the heads that predict further tokens are sent, where the model
    has some: to an engine with the component of that name, at one commit with the policy.

    Collective over ``group``, within ``timeout`` seconds. Serves one update. Float tensors go as
    the model holds them and are cast on the way. Raises, on every rank alike, ``WeightMismatch``
    naming every parameter that no rule knows, and tensors that the ranks do not hold whole;
    ``ConfigError`` where the configuration and the model contradict each other.
    """

    def __init__(
        self, model_chunks: nn.Module | Sequence[nn.Module], *, config: Any,
        tp: Place | None = None, pp: Place | None = None, ep: Place | None = None,
        etp: Place | None = None, group: Any = None, mtp: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
        self._group = group
        self.agreement = RankGroup()
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.agreement = RankGroup.over(tuple(ranks), timeout)
        self._parts: dict[str, list[Part]] = {}
        with self.agreement.step("megatron", timeout):
            places = {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
            layout = MegatronLayout.of(config, places, alone=self.agreement.size == 1)
            for part in layout.parts(chunks):
                if mtp or component_of(part.name) == POLICY:
                    self._parts.setdefault(part.name, []).append(part)
        mine = {
            name: [str(p[0].values.dtype).removeprefix("torch."), p[0].shape, [q.box for q in p]]
            for name, p in self._parts.items()
        }
        said = self.agreement.exchange({"tensors": to_plain(mine)}, timeout, "megatron tensors")
        try:
            self._take([reply["tensors"] for reply in said])
        except BaseException:  # on all ranks, which have heard the same
            self.agreement.close()
            raise

    def _take(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Learn from what every rank holds: the metadata, and who sends which box of a gather."""
        metas: dict[str, TensorMeta] = {}
        have: list[dict[str, tuple[Box, ...]]] = []
        self._holders: dict[str, dict[Box, int]] = {}
        for member, tensors in enumerate(said):
            have.append({})
            for name, (dtype, shape, plain) in tensors.items():
                meta = TensorMeta(name, getattr(torch, dtype), tuple(shape))
                if metas.setdefault(name, meta) != meta:
                    raise WeightMismatch(
                        f"{name} is {meta} on rank {self.agreement.ranks[member]} and "
                        f"{metas[name]} on another; are tp, pp, ep and etp right?"
                    )
                have[-1][name] = from_plain(tuple[Box, ...], plain)
                for box in have[-1][name]:
                    self._holders.setdefault(name, {}).setdefault(box, member)
        self._metadata = tuple(metas.values())
        if (problem := gap(self._metadata, have)) is not None:
            raise WeightMismatch(f"{problem}; are tp, pp, ep and etp those of the model?")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(component_of(meta.name) for meta in self._metadata))

    def metadata(self) -> tuple[TensorMeta, ...]:
        return self._metadata

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(m.name, [p.box for p in self._parts.get(m.name, ())]) for m in self._metadata]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        return [(part.box, part.values) for part in self._parts.get(name, ())]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """One gather for each tensor, for what cannot read boxes where they lie."""
        for meta in self._metadata:
            yield meta.name, self._gathered(meta)

    def _gathered(self, meta: TensorMeta) -> Tensor:
        """A tensor whole on the first rank, whose own boxes do not travel; "meta" elsewhere."""
        mine, here = dict(self.local_values(meta.name)), self.agreement
        if not here.is_sender:
            for box, holder in self._holders[meta.name].items():
                if holder == here.rank:
                    dist.send(mine[box].contiguous(), here.ranks[0], self._group)
            return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        device = next(iter(self._parts.values()))[0].values.device
        full = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        for box, holder in self._holders[meta.name].items():
            values = mine.get(box)
            if values is None:
                values = torch.empty(box.shape, dtype=meta.dtype, device=device)
                dist.recv(values, here.ranks[holder], self._group)
            full[box.slices].copy_(values)
        return full


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

    def parts(self, chunks: Sequence[nn.Module]) -> list[Part]:
        """Every parameter of this rank; raises one ``WeightMismatch`` with all that is unknown."""
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
                parts = self._parts_of(name, tensor.detach(), number)
                if parts is None:
                    unknown.append(name)
                found += parts or ()
        if unknown:
            raise WeightMismatch(
                f"nothing was sent: no rule says what {some(unknown)} of the Megatron model "
                f"are in a checkpoint of {self.config['model_type']!r}",
                problems=unknown,
            )
        return found

    def _check(self, chunk: nn.Module) -> None:
        """Refuse what would be sent wrongly under the right name."""
        settings = getattr(chunk, "config", None)
        for field in (
            "layernorm_zero_centered_gamma",
            "attention_output_gate",
            "rotary_interleaved",  # rows of queries and keys in another order than files have
            "moe_mlp_glu_interleave_size",  # blocks of gate and up in turns
        ):
            if getattr(settings, field, None):
                raise ConfigError(f"Megatron's {field}: such weights cannot be sent yet")
        shared = getattr(chunk, "share_embeddings_and_output_weights", None)
        if shared is not None and shared != self._tied:
            raise ConfigError(
                f"the model has share_embeddings_and_output_weights={shared} and the configuration "
                f"tie_word_embeddings={self._tied}"
            )

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
            return [_whole("model.norm.weight", tensor)]
        if (match := _LAYER.fullmatch(name)) is not None:
            return self._layer(f"model.layers.{number(int(match[1]))}", match[2], tensor)
        if (match := _HEAD.fullmatch(name)) is None:
            return None
        behind = int(self.config["num_hidden_layers"]) + int(match[1])
        found = self._head(f"model.layers.{behind}", match[2], tensor)
        return found and [replace(part, name=qualified(HEAD, part.name)) for part in found]

    def _head(self, layer: str, rest: str, tensor: Tensor) -> list[Part] | None:
        """As files of DeepSeek-V3 and GLM-4.5 have it: behind the last layer."""
        if self.config["model_type"] not in _OF_DEEPSEEK_V3:
            return None
        if rest in _AROUND:
            return [_whole(f"{layer}.{_AROUND[rest]}", tensor)]
        if rest == "eh_proj.weight":
            return [_cut(f"{layer}.eh_proj.weight", tensor, 0, self.tp)]
        return self._layer(layer, rest, tensor)

    def _layer(self, layer: str, rest: str, tensor: Tensor) -> list[Part] | None:
        latent = "kv_lora_rank" in self.config
        if latent and rest in _LATENT_NORMS:
            return [_whole(f"{layer}.{_LATENT_NORMS[rest]}", tensor)]
        if latent and rest in _LATENT:
            return [self._latent(f"{layer}.self_attn.{_LATENT[rest]}.weight", tensor)]
        if rest in _REPLICATED:
            return [_whole(f"{layer}.{_REPLICATED[rest]}", tensor)]
        if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self._qkv(f"{layer}.self_attn", rest.rsplit(".", 1)[1], tensor)
        if rest == "self_attention.linear_proj.weight":
            return [_cut(f"{layer}.self_attn.o_proj.weight", tensor, 1, self.tp)]
        linear = re.fullmatch(r"mlp\.linear_fc([12])\.weight", rest)
        if linear is not None:
            return _mlp(f"{layer}.mlp", PROJ_NAMES.linears, linear[1], tensor, self.tp)
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
        return [_rows(name, (total, *rest), start, tensor[: stop - start])]

    def _qkv(self, module: str, kind: str, tensor: Tensor) -> list[Part]:
        """Rows interleaved by query group, cut over ranks wherever in a group that falls."""
        heads = int(self.config["num_attention_heads"])
        groups = int(self.config.get("num_key_value_heads") or heads)
        dim = int(self.config.get("head_dim") or self.config["hidden_size"] // heads)
        (rank, size), (rows, *rest) = self.tp, tensor.shape
        if rows * size != (heads + 2 * groups) * dim:
            raise WeightMismatch(
                f"linear_qkv of {module} has {rows} rows on each of {size} tensor-parallel ranks; "
                f"{heads} heads in {groups} groups of dimension {dim} have "
                f"{(heads + 2 * groups) * dim}"
            )
        wide = {"q_proj": heads // groups * dim, "k_proj": dim, "v_proj": dim}
        found, at, first = [], 0, rank * rows  # ``at``: a row of the whole fused matrix
        for group in range(groups):
            for linear, count in wide.items():
                start, stop = max(at, first), min(at + count, first + rows)
                if start < stop:
                    shape = (groups * count, *rest)
                    values = tensor[start - first : stop - first]
                    to = group * count + start - at
                    found.append(_rows(f"{module}.{linear}.{kind}", shape, to, values))
                at += count
        return found

    def _latent(self, name: str, tensor: Tensor) -> Part:
        """This rank's rows; of what leads into the latent space all of them, or its rows."""
        config = self.config
        whole = {
            "q_a_proj": config.get("q_lora_rank"),
            "kv_a_proj_with_mqa": int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]),
        }
        if len(tensor) == whole.get(name.split(".")[-2]):
            return _whole(name, tensor)
        return _cut(name, tensor, 0, self.tp)

    def _experts(self, layer: str, rest: str, tensor: Tensor) -> list[Part] | None:
        """A router, the expert that every token passes, or one expert's linear: of
        ``local_experts``, or grouped (``weight3``).
        """
        kind = self.config["model_type"]
        names = W123_NAMES if kind == "mixtral" else PROJ_NAMES
        if rest == "mlp.router.weight":
            return [_whole(f"{layer}.{names.module}.gate.weight", tensor)]
        if rest == "mlp.router.expert_bias" and kind in _OF_DEEPSEEK_V3:
            return [_whole(f"{layer}.{names.module}.gate.e_score_correction_bias", tensor)]
        if rest == "mlp.shared_experts.gate_weight" and kind == "qwen2_moe":
            return [_whole(f"{layer}.mlp.shared_expert_gate.weight", tensor)]
        shared = re.fullmatch(r"mlp\.shared_experts\.linear_fc([12])\.weight", rest)
        if shared is not None:
            module = "shared_expert" if kind == "qwen2_moe" else "shared_experts"
            return _mlp(f"{layer}.mlp.{module}", names.linears, shared[1], tensor, self.tp)
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
        return _mlp(module, names.linears, match[2] or match[3], tensor, self.etp)


def _refuse_spread(items: Sequence[tuple[str, Tensor]]) -> None:
    """Of an FSDP's parameter this rank has rows, or a piece of its memory, that no rule knows."""
    if spread := [name for name, tensor in items if is_dtensor(tensor)]:
        raise WeightMismatch(
            f"nothing was sent: {some(spread)} of the Megatron model are DTensors, as "
            "Megatron-FSDP and torch's FSDP make them, and are not read here; pass pairs of the "
            "checkpoint's names and full_tensor() instead",
            problems=spread,
        )


def _mlp(
    module: str, linears: tuple[str, str, str], which: str, tensor: Tensor, place: Place
) -> list[Part]:
    """``linear_fc1`` (this rank's rows of gate, then of up) or ``linear_fc2`` (its columns)."""
    gate, up, down = linears
    if which == "2":
        return [_cut(f"{module}.{down}.weight", tensor, 1, place)]
    halves = tensor.chunk(2)
    return [
        _cut(f"{module}.{linear}.weight", half, 0, place)
        for linear, half in zip((gate, up), halves, strict=True)
    ]


def _whole(name: str, tensor: Tensor) -> Part:
    return _rows(name, tuple(tensor.shape), 0, tensor)


def _rows(name: str, shape: Sequence[int], start: int, values: Tensor) -> Part:
    box = Box.full(tuple(values.shape)).shifted((start, *(0,) * (values.dim() - 1)))
    return Part(name=name, shape=tuple(shape), box=box, values=values)


def _cut(name: str, values: Tensor, axis: int, place: Place) -> Part:
    """An equal share of ``axis``."""
    rank, size = place
    by, shape = [0] * values.dim(), list(values.shape)
    by[axis], shape[axis] = rank * shape[axis], size * shape[axis]
    box = Box.full(tuple(values.shape)).shifted(tuple(by))
    return Part(name=name, shape=tuple(shape), box=box, values=values)


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

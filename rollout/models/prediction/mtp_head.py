"""A multi-token prediction (MTP) head: one decoder layer behind the policy's last hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.causal_lm import CausalLM, make_block, make_rotary
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import CosSin
from rollout.models.layers.base import Build
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.layers.norm import Norm, make_norm
from rollout.models.layers.rotary import Rotary
from rollout.models.prediction.head import REMEDY, PredictionHead
from rollout.models.weight_io.table import build_table
from rollout.weights import TensorMeta

MTP = "mtp."  # what names begin with in Qwen's releases


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What every head has, whatever its files call it."""

    of_token: Norm
    of_state: Norm
    joined: ReplicatedLinear
    block: nn.Module
    last: Norm


class MTPHead(PredictionHead):
    """Reads the policy's states behind its last norm.

    Joins a token and a state, each normalised, in a linear that every rank holds whole; the layer
    behind it has the policy's rope and experts (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    Embedding and vocabulary head are the policy's; copies of them, which files of some releases
    have, are passed over. Of several such layers the first one runs. Names in ``table`` are those
    of the files: ``mtp.``, or ``model.layers.N.``, N being the number of the policy's layers.

    States go on normalised, as the policy's do, like those of transformers' ``MtpModel``.

    ``build`` is the policy's; ``config`` is of one layer, as ``KVShape.of_draft`` takes it.
    ``tensors``: what the files have, of the head at least; ``prefixes``: of others, as
    ``HeldTensors``. Raises ``ConfigError``; see ``head_fault``.
    """

    told = "prediction head"
    comes_with_policy = True

    def __init__(
        self,
        build: Build,
        max_len: int,
        tensors: Sequence[TensorMeta],
        prefixes: Mapping[str, str] = MappingProxyType({}),
        rotary: Rotary | None = None,
    ) -> None:
        self._given = build, max_len, tensors, prefixes
        names, root = {meta.name for meta in tensors}, _root(build.config)
        own = _own_build(build, names, f"{root}layers.0." if root == MTP else root)
        rotary = rotary or make_rotary(own, own.config.layers[0].rope, max_len)
        super().__init__(own, max_len, rotary)
        if root == MTP:
            self.mtp, self._parts = _of_qwen(own)
        else:
            self.model, self._parts = _of_next_layer(own, root)
        self.table = build_table(self, prefixes=_narrowed(root, build.config, names, prefixes))
        self.refuse_missing(f"the prediction head of {self.config.architecture}", tensors)
        self.eval()

    def embedded(self, policy: CausalLM, ids: Tensor) -> Tensor:
        return policy.embedded(ids)

    def joined(
        self, tokens: Tensor, before: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        parts = self._parts
        x = parts.joined(torch.cat((parts.of_token(tokens), parts.of_state(before)), dim=-1))
        made: tuple[Tensor, Tensor] = parts.block(x, None, cos_sin, batch, kv)
        return made

    def ended(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._parts.last.add(x, residual)[0]

    @torch.no_grad()
    def logits(self, policy: CausalLM, states: Tensor) -> Tensor:
        with policy.unadapted():
            return policy.logits(states)

    def empty_like(self) -> Self:
        return type(self)(*self._given, self.rotary)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFiles:
    """A release's files, of the head or of all; ``tensors`` and ``prefixes`` as of ``MTPHead``."""

    directory: Path
    config: ModelConfig
    tensors: tuple[TensorMeta, ...]
    prefixes: Mapping[str, str]

    def fault(self) -> str:
        return head_fault(self.config, self.tensors)

    def build(self, beside: Build, longest: int) -> MTPHead:
        config, policy, fault = self.config, beside.config, ""
        if _family(config) != _family(policy):
            fault = f"is of {config.architecture}, and the model is {policy.architecture}"
        for size in ("hidden_size", "vocab_size", "num_layers"):
            own, wanted = getattr(config, size), getattr(policy, size)
            if own != wanted:
                fault = fault or f"is of a model whose {size} is {own}, and the model's is {wanted}"
        if fault:
            raise ConfigError(
                f"the prediction head in {self.directory} {fault}: name the head of the model's "
                "own release"
            )
        # Positions are the policy's, which may be overridden.
        most = policy.max_position_embeddings
        config = replace(config, layers=policy.layers, max_position_embeddings=most)
        return MTPHead(replace(beside, config=config), longest, self.tensors, self.prefixes)


def _family(config: ModelConfig) -> str:
    """What is one model, with images or without."""
    return config.architecture.partition("For")[0]


def head_fault(config: ModelConfig, tensors: Sequence[TensorMeta]) -> str:
    """Why the head of a model cannot run, whose files have ``tensors``, and what to do; "" where
    it can. Takes no memory.
    """
    meta = torch.device("meta")
    try:
        MTPHead(
            Build(config=config, tp=TensorParallel(), dtype=torch.bfloat16, device=meta), 1, tensors
        )
    except ConfigError as error:
        return str(error)
    return ""


def _root(config: ModelConfig) -> str:
    """What names of the first head's tensors begin with; ``ConfigError`` where it cannot run."""
    arch, found = config.arch, config.further_prefixes
    fault = ""
    if config.labels or config.hf_values is not None or arch.lone:
        fault = "is of a kind that nothing here runs"
    elif not found:
        fault = "is unknown: its config.json counts no layers that predict further tokens"
    elif config.indexed_layers:
        fault = "would attend by an index, which does not run"
    elif (found[0] == MTP) != (arch.delta is not None):
        fault = "is of a kind that nothing here runs"
    if fault:
        raise ConfigError(f"the prediction head of {config.architecture} {fault}; {REMEDY}")
    return found[0]


def _own_build(build: Build, names: set[str], layer: str) -> Build:
    """Of one attending layer, with experts where the files have some of it."""
    config, moe = build.config, build.config.moe
    if moe is not None:
        experts = f"{layer}{moe.arch.names.module}.experts."
        sparse = any(name.startswith(experts) for name in names)
        moe = replace(moe, dense_layers=(), sparse_step=1) if sparse else None
    last = replace(config.layers[config.num_layers - 1], recurrent=False)
    own = replace(config, num_layers=1, layers=(last,), moe=moe, delta=None)
    return replace(
        build,
        config=own,
        expert_parallel=build.expert_parallel and moe is not None,
        deterministic=False,
        quantization=None,
    )


def _of_qwen(build: Build) -> tuple[nn.Module, _Parts]:
    parts = _make_parts(build)
    modules = {
        "pre_fc_norm_embedding": parts.of_token,
        "pre_fc_norm_hidden": parts.of_state,
        "fc": parts.joined,
        "layers": nn.ModuleList([parts.block]),
        "norm": parts.last,
    }
    return nn.ModuleDict(modules), parts


def _of_next_layer(build: Build, root: str) -> tuple[nn.Module, _Parts]:
    parts = _make_parts(build)
    modules = {
        "enorm": parts.of_token,
        "hnorm": parts.of_state,
        "eh_proj": parts.joined,
        "shared_head": nn.ModuleDict({"norm": parts.last}),
    }
    for name, module in modules.items():
        parts.block.add_module(name, module)
    _, _, number, _ = root.split(".")
    return nn.ModuleDict({"layers": nn.ModuleDict({number: parts.block})}), parts


def _make_parts(build: Build) -> _Parts:
    hidden = build.config.hidden_size
    return _Parts(
        of_token=make_norm(build, hidden),
        of_state=make_norm(build, hidden),
        joined=ReplicatedLinear(build, 2 * hidden, hidden, tiled=True),
        block=make_block(build, 0),
        last=make_norm(build, hidden),
    )


def _narrowed(
    root: str, config: ModelConfig, names: set[str], prefixes: Mapping[str, str]
) -> Mapping[str, str]:
    """``prefixes`` of all that predict further tokens, but for those behind the first, and for
    copies of what is the policy's.
    """
    listed = (name.split(".")[:3] for name in names if name.startswith(f"{MTP}layers."))
    behind = dict.fromkeys(config.further_prefixes[1:], "")
    behind |= {f"{MTP}layers.{number}.": "" for _, _, number in listed if number != "0"}
    behind |= {f"{root}{copied}.": "" for copied in ("embed_tokens", "shared_head.head")}
    return behind | {prefix: own for prefix, own in prefixes.items() if prefix not in behind}

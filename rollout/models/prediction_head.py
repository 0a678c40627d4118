"""A multi-token prediction (MTP) head: one decoder layer behind the policy's last hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, some
from rollout.models.causal_lm import CausalLM, make_block, make_rotary
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.layers.norm import Norm, make_norm
from rollout.models.layers.rotary import Rotary
from rollout.models.model import Model
from rollout.models.weight_io.table import build_table
from rollout.weights import TensorMeta

MTP = "mtp."  # what names begin with in Qwen's releases
REMEDY = "hold it without draft_component"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What every head has, whatever its files call it."""

    of_token: Norm
    of_state: Norm
    joined: ReplicatedLinear
    block: nn.Module
    last: Norm


class PredictionHead(Model):
    """Guesses the token behind the next one, of the next one and the policy's state before it.

    Joins both, each normalised, in a linear that every rank holds whole, and runs one attending
    decoder layer on that, which is cut over the ranks, and has the policy's rope and experts. What
    comes out may stand in the place of the policy's state, for the token behind (DeepSeek-V3, arXiv
    2412.19437, section 2.2). Embedding and vocabulary head are the policy's; copies of them, which
    files of some releases have, are passed over. Of several such layers the first one runs. Names
    in ``table`` are those of the files: ``mtp.``, or ``model.layers.N.``, N being the number of the
    policy's layers.

    States go on normalised, as the policy's do, like those of transformers' ``MtpModel``.

    ``build`` is the policy's; ``config`` is of one layer, as ``KVShape.of_draft`` takes it. Nothing
    here is quantised, or deterministic. ``tensors``: what the files have, of the head at least;
    ``prefixes``: of others, as ``HeldTensors``. Raises ``ConfigError``; see ``head_fault``.
    """

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
        super().__init__(own, max_len)
        self.rotary = rotary or make_rotary(own, own.config.layers[0].rope, max_len)
        if root == MTP:
            self.mtp, self._parts = _of_qwen(own)
        else:
            self.model, self._parts = _of_next_layer(own, root)
        self.table = build_table(self, prefixes=_narrowed(root, build.config, names, prefixes))
        self._refuse_missing(tensors)
        self.eval()

    def _refuse_missing(self, tensors: Sequence[TensorMeta]) -> None:
        spelled = self.table.spellings.split_shape
        held = {name for meta in tensors for name, _ in spelled(meta.name, meta.shape)}
        if missing := sorted(self.table.slots.keys() - held):
            raise ConfigError(
                f"the prediction head of {self.config.architecture} cannot run without "
                f"{some(missing)}, which its files lack; {REMEDY}"
            )

    @torch.no_grad()
    def hidden_states(
        self, policy: CausalLM, batch: ForwardBatch, kv: Sequence[LayerKV], before: Tensor
    ) -> Tensor:
        """[rows, hidden size] of ``batch.logit_rows``, for ``logits``, and as what is ``before``
        the next token.

        ``before`` [T, hidden size]: what ``policy.hidden_states`` gave at each position, or this
        did; ``batch.input_ids`` are the tokens that came of those, one behind each position, and
        positions are [T]. ``kv``: of the one layer. Adapters of the policy have no part in it.
        Collective: all ranks call it in lockstep; 3 all-reduces.
        """
        parts = self._parts
        with policy.unadapted():
            x = policy.embedded(batch.input_ids)
        x = parts.joined(torch.cat((parts.of_token(x), parts.of_state(before)), dim=-1))
        x, residual = parts.block(x, None, self.rotary(batch.positions), batch, kv[0])
        rows = batch.logit_rows
        return parts.last.add(x[rows], residual[rows])[0]

    @torch.no_grad()
    def logits(self, policy: CausalLM, states: Tensor) -> Tensor:
        """[rows, vocab_size] of what ``hidden_states`` gave, as the policy's; one all-gather."""
        with policy.unadapted():
            return policy.logits(states)

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        raise NotImplementedError("a prediction head runs behind a policy: hidden_states, logits")

    def empty_like(self) -> Self:
        return type(self)(*self._given, self.rotary)


def head_fault(config: ModelConfig, tensors: Sequence[TensorMeta]) -> str:
    """Why the head of a model cannot run, whose files have ``tensors``, and what to do; "" where
    it can. Takes no memory.
    """
    meta = torch.device("meta")
    try:
        PredictionHead(
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

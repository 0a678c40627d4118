"""An EAGLE-3 head: one decoder layer behind states from the midst of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError, some
from rollout.models.causal_lm import CausalLM, make_rotary
from rollout.models.config.model import ModelConfig
from rollout.models.decoder.blocks import make_mlp
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention, CosSin
from rollout.models.layers.base import Build
from rollout.models.layers.embedding import Embedding, Head
from rollout.models.layers.linear import ReplicatedLinear
from rollout.models.layers.norm import make_norm
from rollout.models.layers.rotary import Rotary
from rollout.models.prediction.eagle_config import EagleConfig
from rollout.models.prediction.head import REMEDY, PredictionHead
from rollout.models.weight_io.table import build_table
from rollout.weights import TensorMeta

TARGETS = "d2t"  # int64 [draft vocabulary]: how much higher the policy's number of a token is
MAPS = (TARGETS, "t2d")  # constants between vocabularies, the second of which says nothing more
_LAYERS = ("midlayer", "layers.0")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleFiles:
    """A checkpoint directory: its ``config.json``, what ``tensors`` it has, and ``maps`` of them,
    by name: the constants between its vocabulary and the policy's.
    """

    directory: Path
    values: Mapping[str, Any]
    tensors: tuple[TensorMeta, ...]
    maps: Mapping[str, Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {meta.name: tuple(meta.shape) for meta in self.tensors}

    @property
    def layer(self) -> str:
        """What it calls its layer: as EAGLE and SpecForge do, or as speculators does."""
        return next((name for name in _LAYERS if _has(name, self.tensors)), _LAYERS[0])

    def config(self) -> EagleConfig:
        return EagleConfig.read(self.values, str(self.directory / "config.json"))

    def fault(self) -> str:
        if f"{self.layer}.hidden_norm.weight" not in self.shapes:
            return f"an EAGLE head without {self.layer}.hidden_norm is not EAGLE-3's; {REMEDY}"
        try:
            self.config()
        except ConfigError as error:
            return f"{error}; {REMEDY}"
        return ""

    def build(self, beside: Build, longest: int) -> EagleHead:
        try:
            self.config().layer.check_tensor_parallel(beside.tp.size)
        except ConfigError as error:
            raise self.refused(f"does not divide over the ranks: {error}") from None
        return EagleHead(beside, longest, self)

    def refused(self, why: str) -> ConfigError:
        return ConfigError(f"the EAGLE head in {self.directory} {why}")


def is_eagle(tensors: Sequence[TensorMeta]) -> bool:
    """Whether files with ``tensors`` are an EAGLE head's, of any kind."""
    joins = any(meta.name == "fc.weight" for meta in tensors)
    return joins and any(_has(name, tensors) for name in _LAYERS)


def _has(layer: str, tensors: Sequence[TensorMeta]) -> bool:
    return any(meta.name.startswith(f"{layer}.") for meta in tensors)


class EagleHead(PredictionHead):
    """Reads the policy's states at three places (``reads``), by default before its layers 2, N // 2
    and N - 3 of N, which a linear, held whole by every rank, joins (arXiv 2503.01840).

    Its layer attends to token and state side by side, each normalised, and adds to the state. What
    comes out goes on as it is; behind a norm a vocabulary head makes the logits, maybe of some of
    the policy's tokens alone: the others get -inf. Embedding and vocabulary head are the policy's
    where the files have none. Further norms: ``EagleConfig``. Names in ``table`` are those of the
    files.

    ``build`` is the policy's. Raises ``ConfigError`` where ``files`` are no whole head, or not of
    this policy.
    """

    told = "EAGLE-3 head"

    def __init__(
        self, build: Build, max_len: int, files: EagleFiles, rotary: Rotary | None = None
    ) -> None:
        self._given = build, max_len, files
        config, policy = files.config(), build.config
        self.reads = _reads(files, config, policy)
        vocab = files.shapes.get(_EMBEDDING, (policy.vocab_size,))[0]
        own = replace(
            build,
            config=replace(config.layer, vocab_size=vocab),
            expert_parallel=False,
            deterministic=False,
            quantization=None,
            head_dtype=None,
        )
        rotary = rotary or make_rotary(own, own.config.layers[0].rope, max_len)
        super().__init__(own, max_len, rotary)
        self._layer, self._norm_output = files.layer, config.norm_output
        self._make_layer(own, config, files, policy.hidden_size)
        drafts = self._make_ends(own, files, policy)
        targets = _targets(files, drafts, policy.vocab_size)
        self.targets = None if targets is None else targets.to(build.device)
        self.constants = files.maps
        # Trainers may have the policy's in theirs.
        shared = [name for name in (_EMBEDDING, _HEAD) if name not in files.shapes]
        self.table = build_table(self, prefixes=dict.fromkeys((*MAPS, *shared), ""))
        self.refuse_missing(f"the EAGLE head in {files.directory}", files.tensors)
        self._refuse_more(files)
        _check_joined(files, len(self.reads) * policy.hidden_size, policy)
        self.eval()

    def _make_layer(self, own: Build, config: EagleConfig, files: EagleFiles, read: int) -> None:
        """What makes states of those of ``read`` elements, and norms."""
        hidden, joins = own.config.hidden_size, len(self.reads) * read
        self.input_norm = make_norm(own, joins) if config.input_norm else None
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(make_norm(own, read) for _ in self.reads)
        self.fc = ReplicatedLinear(own, joins, hidden, "fc.bias" in files.shapes, tiled=True)
        block = EagleBlock(own, config.norm_first)
        if self._layer == "midlayer":
            self.midlayer = block
        else:
            self.layers = nn.ModuleList([block])
        self.norm = make_norm(own, hidden)

    def _make_ends(self, own: Build, files: EagleFiles, policy: ModelConfig) -> int:
        """Embedding and vocabulary head, if it has any; how many tokens it drafts."""
        has = files.shapes
        fits = own.config.hidden_size == policy.hidden_size  # else the policy's are of no use
        self.embed_tokens = self.lm_head = None
        if _EMBEDDING in has or not fits:
            self.embed_tokens = Embedding(own)
        drafts = has.get(_HEAD, (policy.vocab_size,))[0]
        if _HEAD in has or not fits:
            self.lm_head = Head(replace(own, config=replace(own.config, vocab_size=drafts)))
        return drafts

    @torch.no_grad()
    def first(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        joined: Tensor = self.fc(states)
        return joined

    def embedded(self, policy: CausalLM, ids: Tensor) -> Tensor:
        embedding = policy.model.embedding if self.embed_tokens is None else self.embed_tokens
        found: Tensor = embedding(ids)
        return found

    def joined(
        self, tokens: Tensor, before: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        block = self.get_submodule(self._layer)
        made: tuple[Tensor, Tensor] = block(tokens, before, cos_sin, batch, kv)
        return made

    def ended(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm.add(x, residual)[0] if self._norm_output else x + residual

    @torch.no_grad()
    def logits(self, policy: CausalLM, states: Tensor) -> Tensor:
        with policy.unadapted():
            head = policy.head if self.lm_head is None else self.lm_head
            logits = head.logits(states if self._norm_output else self.norm(states))
        if self.targets is None:
            return logits
        every = logits.new_full((len(logits), policy.config.vocab_size), float("-inf"))
        return every.index_copy_(1, self.targets, logits)

    def empty_like(self) -> Self:
        return type(self)(*self._given, self.rotary)

    def _refuse_more(self, files: EagleFiles) -> None:
        """Tensors that say that it computes something else."""
        table, known = self.table, {*self.table.slots, *MAPS}
        if more := sorted(n for n in files.shapes if n not in known and not table.ignores(n)):
            raise files.refused(f"has {some(more)}, of which no head makes use that runs; {REMEDY}")


class EagleBlock(nn.Module):
    """Llama's decoder layer, whose attention reads a token's embedding and a state, side by side.

    ``norm_first``: as of ``EagleConfig``. Two all-reduces.
    """

    def __init__(self, build: Build, norm_first: bool) -> None:
        super().__init__()
        hidden = build.config.hidden_size
        self.norm_first = norm_first
        self.input_layernorm = make_norm(build, hidden)  # of the token
        self.hidden_norm = make_norm(build, hidden)
        self.self_attn = Attention(build, 0, 2 * hidden)
        self.post_attention_layernorm = make_norm(build, hidden)
        self.mlp = make_mlp(build)

    def forward(
        self, tokens: Tensor, states: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        """Both [T, hidden] -> what the layer makes of them, and the residual sum, likewise."""
        normed = self.hidden_norm(states)
        x = torch.cat((self.input_layernorm(tokens), normed), dim=-1)  # [T, 2 x hidden]
        x = self.self_attn(x, cos_sin, batch, kv)
        residual = normed if self.norm_first else states
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


def _reads(files: EagleFiles, config: EagleConfig, policy: ModelConfig) -> tuple[int, ...]:
    if policy.hf_values is not None or policy.labels:
        raise files.refused(
            f"reads states of a model's layers, which {policy.architecture} does not give here: it "
            f"is no language model that rollout runs itself; {REMEDY}"
        )
    count = policy.num_layers
    reads = config.reads or tuple(sorted((2, count // 2, count - 3)))
    if any(not 0 <= layer <= count for layer in reads):
        raise files.refused(
            f"reads what comes before layers {', '.join(map(str, reads))}, and the model has "
            f"{count}: name a head that was trained for it, or the layers in the head's "
            "config.json (eagle_aux_hidden_state_layer_ids)"
        )
    return reads


def _check_joined(files: EagleFiles, joins: int, policy: ModelConfig) -> None:
    if (found := files.shapes["fc.weight"][-1]) != joins:
        raise files.refused(
            f"joins states of {found} elements in all, and the model's are {joins} (hidden_size "
            f"{policy.hidden_size}): name a head that was trained for this model"
        )


def _targets(files: EagleFiles, drafts: int, vocab: int) -> Tensor | None:
    """[drafts] int64: each draft token as one of the ``vocab`` of the policy; None: they are the
    same.
    """
    ahead = files.maps.get(TARGETS)
    if ahead is None:
        if drafts != vocab:
            raise files.refused(
                f"has a vocabulary of {drafts} tokens and no {TARGETS}, which says what they are "
                f"of the model's {vocab}: add that to its files, or name a head of this vocabulary"
            )
        return None
    if tuple(ahead.shape) != (drafts,):
        raise files.refused(
            f"has a vocabulary of {drafts} tokens, and {TARGETS} is {list(ahead.shape)}: mend its "
            "files"
        )
    targets = torch.arange(drafts) + ahead.long()
    known = set(targets.tolist())
    if len(known) != drafts or min(known) < 0 or max(known) >= vocab:
        raise files.refused(
            f"has a {TARGETS} by which its {drafts} tokens are not as many of the model's {vocab}: "
            "name a head of this vocabulary"
        )
    return targets

"""A decoder with a vocabulary head, or with a score head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from rollout.kernels.op import are_watched
from rollout.models.adapters.instance import InstanceAdapters
from rollout.models.config.layer import RopeConfig
from rollout.models.config.stage_layers import stage_layers
from rollout.models.decoder.absent import Absent, of_first_stage
from rollout.models.decoder.blocks import Decoder, DecoderBlock, LoneBlock, make_mlp
from rollout.models.decoder.chunks import within_chunks
from rollout.models.decoder.handed_on import HandedOn
from rollout.models.decoder.kv_groups import kv_groups
from rollout.models.decoder.moe import SparseMoE
from rollout.models.decoder.native_blocks import NativeBlocks
from rollout.models.forward import ChosenTokens, ForwardBatch, LayerKV, RoutedExperts
from rollout.models.layers.base import Build
from rollout.models.layers.embedding import Head, VocabParallel
from rollout.models.layers.rotary import Rotary
from rollout.models.layers.score_head import ScoreHead
from rollout.models.model import Model
from rollout.models.weight_io.table import build_table
from rollout.weights.names import HEAD


class CausalLM(Model):
    """What an ``Arch`` declares, built; a model whose blocks differ is a subclass that makes them.

    A live model and its shadow share the rope tables.
    """

    gives_hidden_states = True
    adapters: InstanceAdapters | None = None

    def __init__(
        self, build: Build, max_len: int, rotaries: Sequence[Rotary] | None = None
    ) -> None:
        super().__init__(build, max_len)
        config = build.config
        held = stage_layers(config, build.stage)
        layers = [config.layers[index] for index in held]
        ropes: list[RopeConfig] = []
        for layer in layers:
            if layer.rope not in ropes:
                ropes.append(layer.rope)
        self.chunk_of = [layer.chunk for layer in layers]
        groups = enumerate(kv_groups(config))
        self.group_of = {
            layer - held.start: number for number, group in groups for layer in group.layers
        }
        self.rotary_of = [ropes.index(layer.rope) for layer in layers]
        self.rotaries = rotaries or [make_rotary(build, rope, max_len) for rope in ropes]
        self.embedding_scale = config.embedding_scale
        scale = config.arch.embedding_scale
        if scale is not None and scale.rounded:
            self.embedding_scale = torch.tensor(self.embedding_scale, dtype=build.dtype).item()
        self.model = Decoder(build, [
            self.make_block(build, index) if index in held else self._absent(build, index)
            for index in range(config.num_layers)
        ])  # fmt: skip
        everywhere = self.model.layers
        blocks = [each.away if isinstance(each, Absent) else each for each in everywhere]
        if all(type(block) in (DecoderBlock, LoneBlock) for block in blocks):
            self.sparse_layers = tuple(map(_is_sparse, blocks))
        in_stages = build.stage.count > 1
        self.handed_on = HandedOn(build, self.sparse_layers) if in_stages else None
        self.score = of_first_stage(build, ScoreHead) if config.labels else None
        headless = config.tied or self.score is not None
        self.lm_head = None if headless else of_first_stage(build, Head)
        self.make_parts(build)
        self.table = build_table(
            self,
            {HEAD: f"model.{config.arch.embedding}.weight"} if config.tied else {},
            config.prefixes,
        )
        self.keep_digests()
        self.eval()

    def make_block(self, build: Build, index: int) -> nn.Module:
        """The decoder block number ``index``."""
        return make_block(build, index)

    def _absent(self, build: Build, index: int) -> Absent:
        return Absent(build, lambda away: self.make_block(away, index))

    def make_parts(self, build: Build) -> None:
        """What a subclass has beside the decoder and the head."""

    @property
    def captures_prompts(self) -> bool:  # type: ignore[override]
        """Not where an index chooses tokens by how long its tables may be, or sequences are cut at
        positions that the host reads. Of all layers, as the stages of a pipeline go together.
        """
        config = self.config
        cut = any(layer.chunk for layer in config.layers[: config.num_layers])
        return not (cut or config.indexed_layers)

    @functools.cached_property
    def native_blocks(self) -> NativeBlocks | None:
        """Looked for at the first forward pass, when the blocks are what they will be."""
        return NativeBlocks.of(self.build, self.model.held)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Logits [rows, vocab_size] of ``batch.logit_rows``, in the head's dtype, on every rank.

        Writes this step's keys and values into ``kv``, one entry per layer that is here. Of the
        stages of a pipeline the first one has the logits, the others none. Collective: all ranks
        call it in lockstep with the same batch; exactly 2 x layers + 1 all-reduces (3 x where q and
        k, or what states give, are normalised over the heads of several ranks, or layers attend
        beside a state; 1 x of lone mixers), and one all-gather of the logits.
        """
        return self.logits(self.hidden_states(batch, kv))

    def with_hidden_states(
        self, batch: ForwardBatch, kv: Sequence[LayerKV], count: int
    ) -> tuple[Tensor, Tensor]:
        states = self.hidden_states(batch, kv)
        logits = self.logits(states[:count])
        if self.score is None or not self.build.stage.is_first:
            return logits, states
        return logits, self.score(states)

    @torch.no_grad()
    def hidden_states(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """[rows, hidden size] of ``batch.logit_rows``, after the last norm; as ``forward``. Of
        other stages than the first nothing that is of use.
        """
        if self.handed_on is not None:
            return self.in_turn((batch,), kv)
        if self.adapters is not None:
            self.adapters.begin_step(self, batch)
        experts = RoutedExperts.of(batch)
        x, residual = self._through_blocks(batch, kv, self._entered(batch), None, experts)
        if experts is not None:
            batch.keep_experts(experts.chosen)
        rows, kept = batch.logit_rows, batch.hidden_pages
        if kept is None or kept.layers:
            return self.model.last_norm.add(x[rows], residual[rows])[0]
        x, _ = self.model.last_norm.add(x, residual)
        kept.keep(batch, x)
        return x[rows]

    @torch.no_grad()
    def in_turn(self, parts: Sequence[ForwardBatch], kv: Sequence[LayerKV]) -> Tensor:
        """``hidden_states`` over the stages of a pipeline, of the parts of a step one behind the
        other: while a stage runs one of them, the one before it runs the next.
        """
        assert self.handed_on is not None, "of a model in stages"
        stage, of_first = self.build.stage, list[Tensor | None]()
        for batch in parts:
            if self.adapters is not None:
                self.adapters.begin_step(self, batch)
            tokens = len(batch.input_ids)
            residual, chosen = None, None
            if stage.is_first:
                x = self._entered(batch)
            else:
                x, residual, chosen = self.handed_on.take(tokens, tokens)
            experts = self.handed_on.experts(batch)
            x, residual = self._through_blocks(batch, kv, x, residual, experts)
            here = None if experts is None else experts.chosen
            if stage.is_first:
                of_first.append(here)
                here = None
            self.handed_on.give(batch, x, residual, chosen, here)
        if stage.is_first:
            found = [
                self._back(*each, self.handed_on) for each in zip(parts, of_first, strict=True)
            ]
            states = found[0] if len(found) == 1 else torch.cat(found)
        else:
            states = x.new_empty(sum(len(batch.logit_rows) for batch in parts), x.shape[1])
        stage.settle()
        return states

    def _back(self, batch: ForwardBatch, here: Tensor | None, handed_on: HandedOn) -> Tensor:
        """The hidden states of a part that is back from the last stage. ``here``: what its tokens
        were routed to by the first one.
        """
        tokens, rows, kept = len(batch.input_ids), batch.logit_rows, batch.hidden_pages
        whole = handed_on.gives_all
        x, residual, chosen = handed_on.take(tokens if whole else len(rows), tokens)
        batch.keep_experts(here, chosen)
        x, _ = self.model.last_norm.add(x, residual)
        if kept is not None:
            kept.keep(batch, x)
        return x[rows] if whole else x

    def _entered(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden]: embeddings, and what is seen in their places."""
        x, visual = self.embedded(batch.input_ids), batch.visual
        return x if visual is None else x.index_copy(0, visual.rows, visual.features[:, 0])

    def _through_blocks(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerKV],
        x: Tensor,
        residual: Tensor | None,
        experts: RoutedExperts | None,
    ) -> tuple[Tensor, Tensor]:
        """As ``Decoder``, by the native code where that is made for all of it."""
        if self.build.config.indexed_layers:
            batch = replace(batch, chosen=ChosenTokens())
        cos_sins = [rotary(batch.positions) for rotary in self.rotaries]
        visual = batch.visual
        alone = visual is None or visual.features.shape[1] == 1  # nothing comes between blocks
        alone &= batch.adapter_rows is None  # nor behind their linears
        if alone and self.native_blocks is not None and not are_watched():
            return self.native_blocks(x, *cos_sins[0], batch, kv, residual)
        by_layer = [cos_sins[i] for i in self.rotary_of]
        found: tuple[Tensor, Tensor] = self.model(
            x, by_layer, self._of_layers(batch, kv), kv, residual, experts
        )
        return found

    def embedded(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> [T, hidden], times their factor; one all-reduce."""
        x: Tensor = self.model.embedding(ids)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def _of_layers(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> list[ForwardBatch]:
        """The batch as each layer sees it: the pages of its group, the part in its chunk."""
        grouped = batch.block_tables.dim() == 3
        kinds = [
            (self.group_of.get(i, 0) if grouped else 0, c) for i, c in enumerate(self.chunk_of)
        ]
        of: dict[tuple[int, int], ForwardBatch] = {}
        for group, chunk in dict.fromkeys(kinds):
            seen = batch.of_group(group) if grouped else batch
            of[group, chunk] = within_chunks(seen, chunk, kv[0].k.shape[2]) if chunk else seen
        return [of[kind] for kind in kinds]

    @torch.no_grad()
    def logits(self, states: Tensor, first: int = 0) -> Tensor:
        """Of some of the rows of ``hidden_states``, from ``first`` on, times their factor, under
        their cap; one all-gather. Where a score head stands in the vocabulary's place there are no
        such rows.
        """
        if self.adapters is not None:
            self.adapters.begin_head(first, len(states))
        if not self.build.stage.is_first:
            return states.new_empty(len(states), 0)
        if self.score is not None:
            assert not len(states), "requests that need logits are refused"
            return states.new_empty(0, self.config.vocab_size)
        config, logits = self.config, self.head.logits(states)
        if config.logits_scale != 1:
            logits = logits * config.logits_scale
        if config.logits_softcap:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits

    def unadapted(self) -> AbstractContextManager[None]:
        """Embeddings and logits have nothing of adapters within it; not amid ``hidden_states``."""
        return nullcontext() if self.adapters is None else self.adapters.idle()

    @property
    def head(self) -> VocabParallel:
        head = self.model.embedding if self.lm_head is None else self.lm_head
        assert isinstance(head, VocabParallel), "the first stage has the head"
        return head

    def after_load(self) -> None:
        super().after_load()
        self.contents_moved()

    def contents_moved(self) -> None:
        if self.adapters is not None:
            self.adapters.weights_changed()

    def derive_adapters(self) -> None:
        if self.adapters is not None:
            self.adapters.derive(self)

    def empty_like(self) -> Self:
        fresh = type(self)(self.build, self.max_len, self.rotaries)
        fresh.handed_on = self.handed_on
        if self.adapters is not None:
            self.adapters.attach(fresh)
        return fresh


def make_block(build: Build, index: int) -> nn.Module:
    """A decoder block as the configuration has layer ``index``."""
    moe, arch = build.config.moe, build.config.arch
    if arch.lone:
        feeds = build.config.layers[index].feeds
        made = SparseMoE(build) if feeds == "moe" else make_mlp(build) if feeds else None
        return LoneBlock(build, index, made)
    if moe is None or not moe.is_sparse(index):
        return DecoderBlock(build, index, name=arch.mlp)
    sparse = SparseMoE(build)
    block = DecoderBlock(build, index, sparse, moe.arch.names.module)
    for shared in sparse.beside:
        assert sparse.shared is not None
        block.add_module(sparse.shared.name, shared)
    return block


def make_rotary(build: Build, rope: RopeConfig, max_len: int) -> Rotary:
    """The table of positions below ``max_len`` of layers that turn by ``rope``."""
    config = build.config
    return Rotary(
        rope,
        config.head_dim,
        config.max_position_embeddings,
        max_len,
        torch.float32 if config.arch.wide_rope else build.dtype,
        build.device,
    )


def _is_sparse(block: nn.Module) -> bool:
    """Whether a block of ours has experts."""
    name = "mixer" if isinstance(block, LoneBlock) else block.mlp_name
    return isinstance(getattr(block, str(name)), SparseMoE)

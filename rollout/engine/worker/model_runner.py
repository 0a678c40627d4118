"""One rank's forward pass: weights in, KV pages beside them, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.distributed.stage import Stage
from rollout.engine.memory import available_bytes, release_unused, to_device, total_bytes
from rollout.engine.memory_plan import served_length
from rollout.engine.resolved_model import ResolvedModel
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.fused_sampler import FusedSampler, make_sampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.steps.batch import decode_batch, with_drawn
from rollout.engine.steps.draft_batch import DraftBatch
from rollout.engine.visuals.encoder_cache import EncodedVisuals
from rollout.engine.worker.draft_runner import DraftParts, DraftRunner
from rollout.engine.worker.graphs.decode_inputs import is_decode
from rollout.engine.worker.graphs.graph_sets import GraphSets, Part
from rollout.engine.worker.head_runner import HeadRunner
from rollout.engine.worker.held_component import HeldComponent, head_behind
from rollout.engine.worker.kv_cache import KVCache, KVShape
from rollout.engine.worker.load_trace import traced
from rollout.engine.worker.state_cache import StateCache, StateShape
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.kernels.linear import reads_tiles
from rollout.loader import Checkpoint, open_location
from rollout.models.adapters.slots import AdapterSlots
from rollout.models.away_model import AwayModel
from rollout.models.build import build_model, check_kv_codes, slots_beside
from rollout.models.causal_lm import CausalLM
from rollout.models.components import ComponentModels
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch, HiddenPages, VisualRows
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.prediction.head import HeadBehind
from rollout.models.vision_lm import VisionCausalLM
from rollout.models.weight_io.table import WeightTable
from rollout.weights import LazyTensor, TensorMeta
from rollout.weights.components import POLICY, component_of, own_name, qualified
from rollout.weights.names import placed
from rollout.wire.frames import Reply

_THERE = ("visual", "expert_pages", "hidden_pages")  # of a batch, on the device already
_PART_TOKENS = {"cpu": 64, "cuda": 512}  # of a step's part that keeps a stage busy
_LOGITS = 32 << 20  # elements of logits that are made at once, of many rows


class ModelRunner:
    """Built with its weights loaded; KV pages come with ``kv.allocate``.

    Every rank runs the same steps in the same order; only rank 0, of the first stage, samples, the
    others answer with their version alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        found: ResolvedModel,
        tp: TensorParallel,
        device: torch.device,
        stage: Stage,
    ) -> None:
        started = time.perf_counter()
        self.config, self.tp, self.stage, self.device = config, tp, stage, device
        self.rank, self.world_size = stage.rank(tp), stage.count * tp.size
        self._answers = self.rank == 0
        self._found, self.model_config = found, found.config
        self.dtype = found.dtype_of(config)
        self._components = {
            name: HeldComponent.at(name, found.component(config, name), tp, config.expert_parallel)
            for name in config.components
        }
        self._draft_longest = 0
        if name := config.draft_component:
            wanted = served_length(config, self.model_config.max_position_embeddings)
            self._draft_longest = self._components[name].longest(name, wanted)
        self.adapters: AdapterSlots | None = None
        self._longest: int | None = None  # tokens of a sequence, once that is known
        live = self._build(self.device)
        check_kv_codes(live, config.kv_cache_dtype)
        if config.max_adapters:
            self.adapters = slots_beside(
                live,
                config.max_adapters,
                config.max_lora_rank,
                vocabulary=config.lora_embeddings,
                experts=config.lora_experts,
                paged=config.max_cpu_loras > config.max_adapters,
            )
            self.adapters.attach(live)
        self.bytes_read = self._load(live)
        self.read_seconds = time.perf_counter() - started
        self.table, self.metadata = live.table, live.weight_metadata()
        self.gives_hidden_states = live.gives_hidden_states
        self.weight_bytes = sum(p.numel() * p.element_size() for p in live.parameters())
        shadow = torch.device("cpu") if config.staging == "host" else self.device
        self.sampler = make_sampler(self.device, config.deterministic)
        fused = self._answers and isinstance(self.sampler, FusedSampler)
        draws = fused and config.cuda_graphs != "forward"
        self._graphs = GraphSets(config, live, self.device, draws)
        self._draft = self._make_draft(live, draws)
        self.instances = ModelInstances(
            live,
            self._build,
            shadow,
            config.undo,
            pinned=any(graphs.wanted for graphs in self._all_graphs),
            may_flip=lambda shadow: all(shadow in g for g in self._all_graphs if g.wanted),
            forget=self._forget_graphs,
        )
        self.sparse_layers = live.sparse_layers
        kept = sum(self.sparse_layers) if self._answers else 0
        shape = KVShape.of(
            self.model_config,
            tp.size,
            config.block_size,
            self.dtype,
            kept,
            config.kv_cache_dtype,
            hidden_layers=None if self._draft is None else self._draft.reads,
            stage=stage,
        )
        kept_states = StateShape.of(self.model_config, tp.size, self.dtype, stage)
        self.states = StateCache(kept_states, self.device)
        pages = None if self._draft is None else self._draft.kv
        self.kv = KVCache(shape, self.device, self.states, pages)
        self._visuals = EncodedVisuals()
        self._drawn: dict[int, Tensor] = {}  # by the last step, under its number
        self.load_seconds = time.perf_counter() - started

    @property
    def _all_graphs(self) -> list[GraphSets]:
        return [self._graphs, *([] if self._draft is None else [self._draft.graphs])]

    def _forget_graphs(self, shadow: Model) -> None:
        for graphs in self._all_graphs:
            graphs.forget(shadow)

    def sizes(self) -> dict[str, Any]:
        """What the engine plans its memory with, in bytes."""
        return {
            "weight_bytes": self.weight_bytes,
            "pending_bytes": self.table.pending * self.dtype.itemsize,
            "kv_block_bytes": self.kv.block_bytes,
            "draft_longest": self._draft_longest,
            "drafts_by_head": isinstance(self._draft, HeadRunner),
            "kv_groups": self.kv.told_groups,
            "graph_bytes": sum(graphs.nbytes() for graphs in self._all_graphs),
            "adapter_bytes": 0 if self.adapters is None else self.adapters.nbytes,
            "state_slot_bytes": self.states.shape.slot_bytes,
            "free_bytes": available_bytes(self.device),
            "total_bytes": total_bytes(self.device),
            "host_free_bytes": available_bytes(torch.device("cpu")),
            "seconds": self.load_seconds,
            "bytes_read": self.bytes_read,
            "read_seconds": self.read_seconds,
        }

    def step(
        self,
        args: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        version: int,
        pinned: bool = False,
    ) -> Callable[[], Reply]:
        """One forward pass and, on rank 0, a token for every row that samples.

        ``version`` is the live weights', or where ``pinned`` that of those before them.
        The reply may wait for the device; the next step need not wait for the reply.
        """
        batch, sampling = decode_batch(args, tensors)
        number = args["number"]
        drawn = self._drawn.pop(number - 1, None)
        self._drawn.clear()
        model = self.instances.previous if pinned else self.instances.live
        with torch.inference_mode():
            if "previous_rows" in tensors:
                drawn = None if drawn is None else self._of_rank_0(drawn)
                batch = with_drawn(batch, tensors, drawn)
            if "visuals" in args:
                pixels = tensors.get("pixels")
                batch = replace(batch, visual=self._visual(model, args["visuals"], pixels))
            self.states.copy(tensors.get("state_restores"))
            drafted: dict[str, Tensor] = {}
            drafts = DraftBatch.from_tensors(tensors)
            if drafts is not None and self.stage.is_first:  # others read no tokens
                batch, drafted = self._with_drafts(model, drafts, batch, sampling)
            output = self._output(model, batch, sampling, tensors.get("hidden_sums"))
            if pinned:
                self.instances.shadow_is_read()
            self.states.copy(tensors.get("state_saves"))
            if output is None:
                self._drawn[number] = torch.zeros(sampling.num_sampled, dtype=torch.int64)
                return lambda: ({"version": version}, {})
            self._drawn[number] = output.tokens[: sampling.num_sampled]
            if "expert_slots" in tensors and self.kv.experts is not None:
                slots = to_device(tensors["expert_slots"], self.device)
                output = replace(output, experts=self.kv.experts[slots])
            on_host = output.to_host()
            return lambda: ({"version": version}, on_host().tensors() | drafted)

    def _with_drafts(
        self,
        model: Model,
        drafts: DraftBatch,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
    ) -> tuple[ForwardBatch, dict[str, Tensor]]:
        """``batch`` with what the draft model puts in place of -1, and that alone, as it is told
        where there is any. Collective.
        """
        assert self._draft is not None
        filled = self._draft.complete(model, self.sampler, drafts, batch, sampling)
        drawn = filled.input_ids[batch.input_ids < 0]
        return filled, {"drafts": drawn} if len(drawn) else {}

    def _make_draft(self, live: Model, draws: bool) -> DraftRunner | None:
        name, config = self.config.draft_component, self.config
        if name is None or not self.stage.is_first:
            return None

        def part(instance: Model) -> Part:
            assert isinstance(instance, ComponentModels)
            held = instance.component(name)
            return head_behind(name, held, instance.policy) or held

        shape = KVShape.of_draft(
            part(live).config,
            self.tp.size,
            config.block_size,
            self.dtype,
            config.kv_cache_dtype,
        )
        most = min(config.max_drafting(self.device.type), config.max_num_seqs)
        prompts = min(config.cuda_graph_prefill, most * (config.num_speculative_tokens + 1))
        few = replace(config, max_num_seqs=most, cuda_graph_sizes=(), cuda_graph_prefill=prompts)
        own = DraftParts(
            part=part,
            kv=KVCache(shape, self.device),
            graphs=GraphSets(few, live, self.device, draws, part),
            vocabulary=self.model_config.vocab_size,
            is_first=self._answers,
            to_device=self._moved,
            shared=self._of_rank_0,
        )
        if isinstance(behind := part(live), HeadBehind):
            return HeadRunner(own, behind.head.reads, self._hidden_pages)
        return DraftRunner(own)

    def _hidden_pages(self) -> HiddenPages:
        assert self.kv.hidden is not None
        return self.kv.hidden

    def _output(
        self,
        model: Model,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
        sums: Tensor | None,
    ) -> SamplerOutput | None:
        """What rank 0 made of the step; None on the others. ``sums``: of the rows behind those with
        logits, whose hidden states are wanted.
        """
        count, policy, first = sampling.num_rows, model.policy, self._answers
        self.capture()  # again, after a sleep
        if first and sums is None:
            drawn = self._graphs.draw(model, batch, sampling)
            if drawn is not None:
                return drawn
        states = self._graphs.hidden_states(model, batch)
        if states is None and isinstance(policy, CausalLM):
            states = self._in_parts(policy, batch)
        if isinstance(policy, CausalLM) and (states is not None or count > self._logits_at_once):
            if states is None:
                states = policy.hidden_states(self._to_device(batch), self.kv.layers)
            output = self._sampled(policy, states, sampling)
        else:
            if sums is None:
                logits = self.forward(batch, model)
            else:
                moved, pages = self._to_device(batch), self.kv.layers
                logits, states = model.with_hidden_states(moved, pages, count)
            output = self.sampler.sample(logits, sampling) if first else None
        if output is None or sums is None:
            return output
        assert states is not None
        return replace(output, hidden=_summed(states[count:], sums))

    def _in_parts(self, policy: CausalLM, batch: ForwardBatch) -> Tensor | None:
        """The hidden states of a step that keeps several stages of a pipeline busy at a time, each
        with another part of its tokens; None where it has too few.
        """
        if self.stage.count == 1 or self.model_config.labels:
            return None
        if batch.adapter_rows is not None or batch.visual is not None:
            return None
        if self._graphs.wanted and is_decode(batch):
            return None  # rank 0 may have replayed a graph of all of it
        tokens = len(batch.input_ids)
        count = min(2 * self.stage.count, tokens // _PART_TOKENS[self.device.type])
        if count < 2:
            return None
        stops = [tokens * index // count for index in range(count + 1)]
        parts = [batch.part(start, stop) for start, stop in pairwise(stops)]
        states = policy.in_turn(list(map(self._to_device, parts)), self.kv.layers)
        rows = batch.logit_rows  # of those that sample, then others: each in a part of its own
        order = torch.bucketize(rows, torch.tensor(stops[1:]), right=True).argsort(stable=True)
        return states[to_device(order.argsort(), self.device)]

    def _sampled(
        self, policy: CausalLM, states: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput | None:
        """As ``_output``, of the rows of ``states`` that want logits, some at once."""
        count, step = sampling.num_rows, self._logits_at_once
        parts = []
        for start in range(0, max(count, 1), step):
            stop = min(start + step, count)
            logits = policy.logits(states[start:stop], start)
            if self._answers:
                parts.append(self.sampler.sample(logits, sampling.rows(start, stop)))
        return SamplerOutput.cat(parts) if parts else None

    @property
    def _logits_at_once(self) -> int:
        """Rows of a step that scores many tokens: logits of all of them may not fit."""
        return max(_LOGITS // self.model_config.vocab_size, self.config.max_num_seqs)

    def _visual(self, model: Model, plan: Mapping[str, Any], pixels: Tensor | None) -> VisualRows:
        """On later stages, which have no tower, none: they know that something is seen."""
        policy = model.policy
        if not self.stage.is_first:
            return VisualRows.none(policy.config.hidden_size, self.dtype, self.device)
        assert isinstance(policy, VisionCausalLM)
        if pixels is not None:
            pixels = to_device(pixels, self.device)
        return VisualRows(*self._visuals.follow(plan, policy.encode_visual, pixels))

    def _of_rank_0(self, drawn: Tensor) -> Tensor:
        """Tokens that only rank 0 has drawn; the others have as many of any. Collective."""
        if self.tp.size == 1:
            return drawn
        return self.tp.all_gather(to_device(drawn, self.device))[: len(drawn)]

    def forward(self, batch: ForwardBatch, model: Model) -> Tensor:
        """Logits of an instance for ``batch`` (CPU), on this rank's device; valid until the next
        call, as a captured graph may have made them. Collective over the ranks.
        """
        self.capture()
        found = self._graphs.logits(model, batch)
        if found is not None:
            return found
        logits: Tensor = model(self._to_device(batch), self.kv.layers)
        return logits

    def admit(self, longest: int) -> None:
        """No sequence will have more tokens than that: a config may allow for more than fit into
        the KV cache. Before the first step.
        """
        self._longest = longest
        self._limit_rope(self.instances.live)

    def capture(self) -> None:
        """Capture steps over the instances, where that is wanted and has not been done; weights and
        KV pages have to be there. In lockstep.
        """
        self._graphs.capture(self.instances, self.kv)
        if self._draft is not None:
            self._draft.graphs.capture(self.instances, self._draft.kv)

    def sleep(self, level: int) -> None:
        """Give up the KV pages and the shadow; at level 2 the weights as well."""
        for graphs in self._all_graphs:
            graphs.forget_all()
        self.kv.free()
        self._visuals.clear()
        self.instances.drop_shadow()
        self.sampler = make_sampler(self.device, self.config.deterministic)
        if level == 2:
            self.instances.drop_weights()
        else:
            self.instances.park()
        release_unused(self.device)

    def _to_device(self, batch: ForwardBatch) -> ForwardBatch:
        return self._moved(self.kv.beside(batch))

    def _moved(self, batch: ForwardBatch) -> ForwardBatch:
        if self.device.type == "cpu":
            return batch
        moved = {
            f.name: getattr(batch, f.name).to(self.device, non_blocking=True)
            for f in fields(ForwardBatch)
            if f.name not in _THERE and getattr(batch, f.name) is not None
        }
        visual = batch.visual
        if visual is not None:
            visual = replace(visual, rows=to_device(visual.rows, self.device))
        return replace(batch, **moved, visual=visual)

    def move_adapters(self, moves: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """See ``AdapterPlaces``; between steps, in lockstep on all ranks."""
        assert self.adapters is not None, "there is nothing to move"
        assert self.adapters.pages is not None
        self.adapters.pages.move(moves)
        return {}

    def _build(self, device: torch.device) -> Model:
        policy = self._built(self.model_config, device)
        others = {name: self._component(name, policy.build) for name in self._components}
        if isinstance(policy, CausalLM) and policy.handed_on is not None:
            policy.handed_on.gives_all = self._drafts_by_head
        self._limit_rope(policy)
        if self.adapters is not None:
            self.adapters.attach(policy)
        return ComponentModels(policy, others) if others else policy

    def _component(self, name: str, build: Build) -> Model:
        """Of a pipeline the first stage has all of them, since it drafts."""
        held = self._components[name]
        longest = self._draft_longest if name == self.config.draft_component else None
        if self.stage.is_first:
            return held.build(replace(build, stage=Stage()), longest)
        return AwayModel(build, lambda own: held.build(own, longest))

    @property
    def _drafts_by_head(self) -> bool:
        name = self.config.draft_component
        return name is not None and self._components[name].head is not None

    def _built(self, config: ModelConfig, device: torch.device) -> Model:
        return build_model(
            config,
            self.tp,
            self.dtype,
            device,
            self._layout(),
            max_model_len=self.config.max_model_len,
            expert_parallel=self.config.expert_parallel,
            deterministic=self.config.deterministic,
            quantization=self.config.quantization,
            head_dtype=torch.float32 if self.config.head_dtype == "float32" else None,
            registry=self._found.registry,
            tensors=self._checkpoint_tensors,
            stage=self.stage,
        )

    def _limit_rope(self, model: Model) -> None:
        own = model.policy
        if self._longest is not None and isinstance(own, CausalLM):
            for rotary in own.rotaries:
                rotary.rows = min(rotary.rows, self._longest)

    def _layout(self) -> str:
        """Chosen by the live instance's device: a shadow elsewhere exchanges contents with it."""
        if self.config.weight_layout != "auto":
            return self.config.weight_layout
        return "tiles" if reads_tiles(self.device, self.dtype) else "plain"

    def _checkpoint_tensors(self) -> tuple[TensorMeta, ...]:
        """What the checkpoint's files hold, from their headers."""
        with open_location(self._found.location, self.config.load_format) as checkpoint:
            return checkpoint.metadata()

    def _load(self, model: Model) -> int:
        """Read this rank's part of each checkpoint, and return the bytes of that; the first rank
        shows the progress.
        """
        places = {POLICY: self._found.location}
        places |= {name: str(held.directory) for name, held in self._components.items()}
        wanted = model.weight_metadata()
        with ExitStack() as stack:
            streams, opened = [], []
            for component, place in places.items():
                checkpoint = open_location(
                    place,
                    self.config.load_format,
                    metadata=[
                        replace(meta, name=own_name(meta.name))
                        for meta in wanted
                        if component_of(meta.name) == component
                    ],
                    seed=self.config.seed or 0,  # of made-up weights, the same on all ranks
                    progress=self.config.progress and self._answers,
                    device=str(self.device),
                )
                opened.append(checkpoint)
                stream = _named(component, stack.enter_context(checkpoint), model.table)
                if self.config.trace_load:
                    stream = traced(stream, checkpoint, model.table, self.rank)
                streams.append(stream)
            model.load_weights(chain.from_iterable(streams))
            return sum(checkpoint.bytes_read for checkpoint in opened)


def _named(
    component: str, checkpoint: Checkpoint, table: WeightTable
) -> Iterator[tuple[str, LazyTensor]]:
    """What a component's own files have of it."""
    for name, value in checkpoint.items():
        sent = qualified(component, name)
        if component_of(placed(sent, table.prefixes) or sent) == component:
            yield sent, value


def _summed(states: Tensor, sums: Tensor) -> Tensor:
    """float32 [sums, hidden]: each row of states added to its sum."""
    count = int(sums[-1]) + 1
    if count == len(sums):
        return states.float()
    starts = torch.searchsorted(sums, torch.arange(count + 1)).tolist()
    return torch.stack([states[i:j].float().sum(0) for i, j in pairwise(starts)])

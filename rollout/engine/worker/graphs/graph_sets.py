"""What is captured of each instance of the model: its decode steps, and steps with prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.worker.graphs.captured_parts import CapturedParts
from rollout.engine.worker.graphs.decode_graphs import (
    DecodeGraphs,
    graph_bytes,
    padded_sizes,
    wants_graphs,
)
from rollout.engine.worker.graphs.decode_inputs import DecodeInputs
from rollout.engine.worker.graphs.draw_graphs import CapturePool
from rollout.engine.worker.graphs.prefill_graphs import PrefillGraphs
from rollout.engine.worker.graphs.prefill_inputs import PrefillInputs, prefill_shapes
from rollout.engine.worker.kv_cache import KVCache
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.kernels.paged_attention import has_gpu_kernel
from rollout.models.adapters.instance import InstanceAdapters
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model
from rollout.models.prediction.head import HeadBehind

log = logging.getLogger(__name__)
Graphs = TypeVar("Graphs", DecodeGraphs, PrefillGraphs)
Known = CausalLM | HeadBehind  # of our making: it does what a graph can hold
Part = Model | HeadBehind


class GraphSets:
    """A set over each of the two instances, or over the live one alone where the shadow lies
    elsewhere; ``model`` is one of them, ``part`` what of it runs. They share inputs and memory. Who
    frees what they hold addresses of forgets them, and captures anew. ``draws``: the sampler, too.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        device: torch.device,
        draws: bool,
        part: Callable[[Model], Part] = attrgetter("policy"),
    ) -> None:
        self._config, self._device, self._draws, self._part = config, device, draws, part
        own, arch = part(model), part(model).config
        # Attention without a kernel, whose numbers the host reads, does not fit into a graph.
        _, heads, dim = arch.cached_heads(model.tp.size)
        attends = has_gpu_kernel(heads, dim, own.build.dtype)
        fits = isinstance(own, Known) and attends
        #: whether any step is captured
        self.wanted = not arch.labels and wants_graphs(config, device, fits)
        self.flips = config.staging in ("auto", "device")
        most = min(config.cuda_graph_prefill, config.max_num_batched_tokens)
        prompts = self.wanted and fits and own.captures_prompts
        self._shapes = prefill_shapes(most, config.max_num_seqs) if prompts else ()
        self._hidden = arch.hidden_size * own.build.dtype.itemsize
        self._vocab, self._ranks = arch.vocab_size, model.tp.size * model.build.stage.count
        beside = _adapters_of(own)
        self._parts = CapturedParts(
            states=bool(arch.recurrent_layers),
            adapters=0 if beside is None else beside.captured,
            before=(arch.hidden_size, own.build.dtype) if isinstance(own, HeadBehind) else None,
        )
        self._decode: dict[Model, DecodeGraphs] = {}
        self._prefill: dict[Model, PrefillGraphs] = {}
        self._stream: Any = None  # on which all are captured, also after a sleep

    def __contains__(self, model: Model) -> bool:
        return model in self._decode

    def nbytes(self) -> int:
        """What to set aside for them."""
        if not self.wanted:
            return 0
        states = [shape.tokens * self._hidden for shape in self._shapes]
        return graph_bytes(self._sizes, states, self._vocab, 2 if self.flips else 1)

    def capture(self, instances: ModelInstances, kv: KVCache) -> None:
        """Where that is wanted; weights and KV pages have to be there. In lockstep."""
        if not self.wanted or instances.live in self:
            return
        shadow = instances.prepare_shadow() if self.flips else None
        with torch.inference_mode():
            for model in (instances.live, shadow):
                if model is not None and model not in self:
                    self._capture_over(model, kv)
        if shadow is not None:
            instances.shadow_is_read()  # kernels run before they are captured

    def draw(
        self, model: Model, batch: ForwardBatch, sampling: SamplingMetadata
    ) -> SamplerOutput | None:
        """See ``DecodeGraphs.draw``."""
        graphs = self._of(self._decode, model, batch)
        return None if graphs is None else graphs.draw(batch, sampling)

    def logits(self, model: Model, batch: ForwardBatch) -> Tensor | None:
        """See ``DecodeGraphs.run``."""
        graphs = self._of(self._decode, model, batch)
        return None if graphs is None else graphs.run(batch)

    def hidden_states(self, model: Model, batch: ForwardBatch) -> Tensor | None:
        """Of a batch (CPU) in which some sequence has more than one token, as those of
        ``CausalLM``; None: run it without.
        """
        graphs = self._of(self._prefill, model, batch)
        if graphs is None or len(batch.input_ids) == len(batch.context_lens):
            return None
        states, own = graphs.run(batch), self._part(model)
        beside = _adapters_of(own)
        if states is not None and beside is not None and isinstance(own, CausalLM):
            # The head, which is not captured, asks for it. Where it has adapters no step with some
            # is captured.
            beside.begin_step(own, replace(batch, adapter_rows=None, adapter_tiles=None))
        return states

    def left(self, count: int) -> Tensor:
        """What the decode step of a head that was just replayed has left before the next one,
        [count, hidden size]; valid until the next call.
        """
        return next(iter(self._decode.values())).inputs.left(count)

    def forget(self, model: Model) -> None:
        """An instance is given up; a step that replays its graphs may still run."""
        found = self._decode.pop(model, None), self._prefill.pop(model, None)
        for graphs in found:
            if graphs is not None:
                torch.cuda.synchronize(self._device)
                graphs.drop()

    def forget_all(self) -> None:
        for model in list(self._decode):
            self.forget(model)

    @property
    def _sizes(self) -> list[int]:
        most = self._config.max_num_seqs
        sizes = self._config.cuda_graph_sizes or padded_sizes(most)
        return [size for size in sizes if size <= most] or [most]

    def _of(self, sets: Mapping[Model, Graphs], model: Model, batch: ForwardBatch) -> Graphs | None:
        """Those of an instance, if they do what the adapters of ``batch`` do."""
        beside = _adapters_of(self._part(model))
        return sets.get(model) if beside is None or beside.are_plain(batch) else None

    def _capture_over(self, model: Model, kv: KVCache) -> None:
        beside = _adapters_of(self._part(model))
        with nullcontext() if beside is None else beside.captured_steps():
            pool = self._capture_decodes(model, kv)
            if self._shapes:
                self._capture_prompts(model, kv, pool)

    def _capture_decodes(self, model: Model, kv: KVCache) -> CapturePool:
        pages, own, sizes = kv.layers, self._part(model), self._sizes
        others = next(iter(self._decode.values()), None)
        if others is None:
            pool = CapturePool(self._device, self._stream)
            self._stream = pool.stream
            inputs = DecodeInputs(max(sizes), *self._tables(own, kv), parts=self._parts)
        else:
            pool, inputs = others.pool, others.inputs
        graphs = DecodeGraphs(
            lambda batch: own(kv.beside(batch), pages),
            sizes,
            inputs,
            pool,
            self._device,
            draws=self._draws,
            deterministic=self._config.deterministic,
        )
        self._draws = graphs.draws is not None  # else it would fail again
        self._decode[model] = graphs
        return pool

    def _tables(self, own: Part, kv: KVCache) -> tuple[int, torch.device, int]:
        """Blocks of the longest table, where tables lie, and how many a sequence has."""
        groups, block, longest = kv.shape.groups, self._config.block_size, own.max_len
        if not groups or not groups[-1].forgets:  # else there are more positions than places
            longest = min(longest, kv.num_blocks * block)
        return -(-longest // block), self._device, max(len(groups), 1)

    def _capture_prompts(self, model: Model, kv: KVCache, pool: CapturePool) -> None:
        pages, own = kv.layers, self._part(model)
        assert isinstance(own, Known)
        others = next(iter(self._prefill.values()), None)
        if others is None:
            tokens, sequences = (max(of) for of in zip(*self._shapes, strict=True))
            tables = self._tables(own, kv)
            inputs = PrefillInputs(tokens, sequences, *tables, parts=self._parts)
        else:
            inputs = others.inputs
        try:
            self._prefill[model] = PrefillGraphs(
                lambda batch: own.hidden_states(kv.beside(batch), pages),
                self._shapes,
                inputs,
                pool,
                self._device,
            )
        except Exception:  # such steps are as right outside of a graph, and only slower
            if self._ranks > 1:
                raise  # the others replay theirs, whose collectives are of other shapes
            log.warning(
                "steps with prompts are not captured; cuda_graph_prefill=0 does not try",
                exc_info=True,
            )
            self._shapes = ()


def _adapters_of(own: Part) -> InstanceAdapters | None:
    return own.adapters if isinstance(own, Known) else None

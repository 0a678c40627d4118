"""Ranks as threads of one process, a paged KV cache to run a model over, and a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.distributed import RendezvousServer, TensorParallel, join_group
from rollout.distributed.stage import Stage, place_of
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.config.stage_layers import stage_layers
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.model import Model

T = TypeVar("T")
BLOCK = 8


def run_ranks(size: int, work: Callable[[TensorParallel], T]) -> list[T]:
    """Run ``work`` on every rank of a fresh group; results in rank order, first error raised."""
    if size == 1:
        return [work(TensorParallel())]
    server = RendezvousServer(size, "gloo")

    def rank_main(rank: int) -> T:
        return work(TensorParallel(rank, size, join_group(server.info, rank, 20.0)))

    try:
        with ThreadPoolExecutor(size) as pool:
            return [f.result() for f in [pool.submit(rank_main, r) for r in range(size)]]
    finally:
        server.close()


def run_stages(stages: int, size: int, work: Callable[[TensorParallel, Stage], T]) -> list[T]:
    """As ``run_ranks``, of ``stages`` of ``size`` ranks each, stage by stage."""
    server = RendezvousServer(stages * size, "gloo")

    def rank_main(rank: int) -> T:
        tp, stage = place_of(rank, size, stages)
        if size > 1:
            where = replace(server.info, size=size)
            tp.group = join_group(where, tp.rank, 20.0, tag=f"stage-{stage.index}")
        stage.connect(
            lambda *given: join_group(*given[:2], 20.0, tag=given[2]), server.info, tp.rank
        )
        return work(tp, stage)

    count = stages * size
    try:
        with ThreadPoolExecutor(count) as pool:
            return [f.result() for f in [pool.submit(rank_main, r) for r in range(count)]]
    finally:
        server.close()


def loaded(
    config: ModelConfig,
    tp: TensorParallel,
    weights: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    layout: str = "plain",
    expert_parallel: bool = False,
    deterministic: bool = False,
    quantization: str = "none",
    max_model_len: int | None = None,
    stage: Stage | None = None,
) -> Model:
    """A model of this rank with ``weights`` loaded."""
    model = build_model(
        config,
        tp,
        dtype,
        "cpu",
        layout,
        max_model_len=max_model_len,
        expert_parallel=expert_parallel,
        deterministic=deterministic,
        quantization=quantization,
        stage=stage,
    )
    model.load_weights(weights.items())
    return model


class Session:
    """A KV cache with one block table per sequence, interleaved so that no table is contiguous.

    ``codes``: what its pages hold, if not what the model computes in.
    """

    def __init__(
        self,
        model: Model,
        sequences: Sequence[Sequence[int]],
        codes: torch.dtype | None = None,
    ) -> None:
        config, tp = model.config, model.tp
        self.model = model
        self.sequences = [list(s) for s in sequences]
        self.done = [0] * len(sequences)
        per = max(-(-len(s) // BLOCK) for s in sequences)
        tables = torch.arange(per * len(sequences), dtype=torch.int32).view(per, -1).T
        self.tables = tables.contiguous()
        tensors, heads, elements = config.cached_heads(tp.size)
        shape = (self.tables.numel(), heads, BLOCK, elements)
        self.kv = []
        self.slots = torch.arange(len(sequences), dtype=torch.int32).flip(0) + 1
        for layer in stage_layers(config, model.build.stage):
            if layer in config.recurrent_layers and layer not in config.paged_layers:
                self.kv.append(_states(model, len(sequences) + 2))
                continue
            if layer in config.feeding_layers:
                self.kv.append(LayerKV(torch.empty(0), torch.empty(0)))
                continue
            k = torch.full(shape, 7.0).to(codes or model.build.dtype)
            beside = layer in config.recurrent_layers
            states = _states(model, len(sequences) + 2) if beside else None
            index = None
            if layer in config.indexed_layers:
                dim = config.latent.index.dim
                index = torch.full((shape[0], 1, BLOCK, dim), 7.0, dtype=model.build.dtype)
            scales = None if codes is None else torch.full(shape[:3], 7.0)
            v, others = (k, scales) if tensors == 1 else (k.clone(), _copy(scales))
            self.kv.append(LayerKV(k, v, scales, others, states, index))

    def advance(self, counts: Sequence[int]) -> list[Tensor]:
        """Run the next ``counts[s]`` tokens of each sequence; their logits, per sequence."""
        batch = self.batch(counts)
        logits = self.model(batch, self.kv)
        parts = iter(logits.split([c for c in counts if c]))
        return [next(parts) if c else logits[:0] for c in counts]

    def batch(self, counts: Sequence[int]) -> ForwardBatch:
        """The next ``counts[s]`` tokens of each sequence, with the logits of all of them."""
        ids, positions, slots, starts, lengths, active = [], [], [], [0], [], []
        for s, count in enumerate(counts):
            first, last = self.done[s], self.done[s] + count
            self.done[s] = last
            if not count:
                continue
            active.append(s)
            ids += self.sequences[s][first:last]
            positions += range(first, last)
            slots += [
                int(self.tables[s, p // BLOCK]) * BLOCK + p % BLOCK for p in positions[-count:]
            ]
            starts.append(len(ids))
            lengths.append(last)
        return ForwardBatch(
            torch.tensor(ids),
            torch.tensor(positions),
            torch.tensor(slots),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            self.tables[active],
            torch.arange(len(ids)),
            state_slots=self.slots[active],
        )


def prompts(vocab: int, lengths: Sequence[int] = (19, 6, 33)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """A transformers model's logits, each sequence by itself: float32, [tokens, vocabulary]."""
    with torch.no_grad():
        return [model(torch.tensor([s])).logits[0].float() for s in sequences]


def _copy(scales: Tensor | None) -> Tensor | None:
    return None if scales is None else scales.clone()


def _states(model: Model, slots: int) -> LayerKV:
    """One layer's states, holding what nothing may read."""
    assert model.config.recurrence is not None
    inputs, state = model.config.recurrence.state_shapes(model.tp.size)
    k = torch.full((slots, *inputs), 7.0, dtype=model.build.dtype)
    return LayerKV(k, torch.full((slots, *state), 7.0))

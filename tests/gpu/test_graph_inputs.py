"""Captured steps, as far as it goes without a card: sizes, inputs, padding, addresses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import write_tiny

from rollout import kernels
from rollout.config import EngineConfig
from rollout.distributed import TensorParallel
from rollout.distributed.stage import Stage
from rollout.engine.worker.graphs.captured_parts import CapturedParts
from rollout.engine.worker.graphs.decode_graphs import padded_sizes, wants_graphs
from rollout.engine.worker.graphs.decode_inputs import DecodeInputs, is_decode
from rollout.engine.worker.graphs.draw_graphs import CapturePool
from rollout.engine.worker.graphs.graph_sets import GraphSets
from rollout.engine.worker.graphs.prefill_inputs import (
    PrefillInputs,
    PrefillShape,
    prefill_shapes,
    prefill_sizes,
)
from rollout.engine.worker.kv_cache import KVCache, KVShape
from rollout.engine.worker.model_runner import ModelRunner
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import ConfigError
from rollout.kernels.gpu_support import triton_runs
from rollout.kernels.paged_attention import has_few_queries
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model

CPU = torch.device("cpu")


def _batch(count: int, width: int = 2, contexts: tuple[int, ...] | None = None) -> ForwardBatch:
    lengths = torch.tensor(contexts or range(5, 5 + count), dtype=torch.int32)
    tables = torch.arange(1, 1 + count * width, dtype=torch.int32).view(count, width)
    positions = (lengths - 1).long()
    return ForwardBatch(
        input_ids=torch.arange(10, 10 + count),
        positions=positions,
        slot_mapping=tables[torch.arange(count), positions // 4].long() * 4 + positions % 4,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=lengths,
        block_tables=tables,
        logit_rows=torch.arange(count),
    )


def test_padding_is_at_most_a_third_of_a_batch() -> None:
    for largest in (1, 2, 7, 64, 256):
        sizes = padded_sizes(largest)
        assert sizes[-1] == largest
        for count in range(1, largest + 1):
            size = next(s for s in sizes if s >= count)
            assert size - count <= size / 3


def test_a_step_with_more_than_decodes_is_not_replayed() -> None:
    batch = _batch(3)
    assert is_decode(batch)
    chunk = ForwardBatch(
        input_ids=torch.arange(3),
        positions=torch.arange(3),
        slot_mapping=torch.arange(3),
        query_starts=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        logit_rows=torch.tensor([0, 1, 2]),
    )
    assert not is_decode(chunk)


def test_inputs_stay_where_they_are_and_padding_has_no_slot() -> None:
    inputs = DecodeInputs(6, 4, CPU)
    before = [t.data_ptr() for t in vars_of(inputs.batch(4))]
    inputs.fill(_batch(4), 4)
    small = _batch(2, width=3, contexts=(9, 4))
    inputs.fill(small, 4)
    got = inputs.batch(4)
    assert [t.data_ptr() for t in vars_of(got)] == before
    for name in ("input_ids", "positions", "slot_mapping", "context_lens"):
        assert torch.equal(getattr(got, name)[:2], getattr(small, name)), name
    assert torch.equal(got.block_tables[:2, :3], small.block_tables)
    assert got.slot_mapping[2:].tolist() == [-1, -1]
    assert got.context_lens[2:].tolist() == [1, 1]
    assert is_decode(got)
    assert inputs.fits(small)
    assert not inputs.fits(_batch(7, width=3))
    assert not inputs.fits(_batch(1, width=5))


def test_each_group_of_layers_has_slots_and_tables_of_its_own() -> None:
    inputs = DecodeInputs(6, 4, CPU, groups=3)
    batches = [_batch(2, width=width, contexts=(7, 4)) for width in (2, 2, 2)]
    slots = torch.stack([batch.slot_mapping + 100 * i for i, batch in enumerate(batches)])
    tables = torch.stack([batch.block_tables + 10 * i for i, batch in enumerate(batches)])
    batch = replace(batches[0], slot_mapping=slots, block_tables=tables)
    inputs.fill(_grouped(3), 4)
    inputs.fill(batch, 4)
    got = inputs.batch(4)
    assert is_decode(got)
    for i in range(3):
        seen, wanted = got.of_group(i), batch.of_group(i)
        assert torch.equal(seen.slot_mapping[:2], wanted.slot_mapping)
        assert seen.slot_mapping[2:].tolist() == [-1, -1]
        assert torch.equal(seen.block_tables[:2, :2], wanted.block_tables)
        assert torch.equal(seen.lasting_slots[:2], slots[-1])
    assert got.context_lens.tolist() == [7, 4, 1, 1]
    assert not inputs.fits(_batch(1, width=5))


def test_inputs_have_what_some_models_have_beside_tokens() -> None:
    """Padding has no slot of states, no adapter, and whatever a head read before."""
    parts = CapturedParts(states=True, adapters=3, before=(2, torch.float32))
    tiles = torch.tensor([[2, 0, 1], [0, 1, 2]], dtype=torch.int32)
    batch = replace(
        _batch(2),
        state_slots=torch.tensor([4, 0], dtype=torch.int32),
        adapter_rows=torch.tensor([1, 0], dtype=torch.int32),
        adapter_tiles=tiles,
        before=torch.ones(2, 2),
    )
    decodes, shape = DecodeInputs(6, 4, CPU, parts=parts), PrefillShape(16, 3)
    prompts = PrefillInputs(*shape, 4, CPU, parts=parts)
    for empty in (decodes.batch(6), prompts.batch(shape)):
        assert set(empty.state_slots.tolist()) == {-1}
        assert not empty.adapter_tiles.any()
    decodes.fill(batch, 4)
    prompts.fill(batch, shape)
    for got, rows in ((decodes.batch(4), 4), (prompts.batch(shape), 3)):
        assert got.state_slots.tolist() == [4, 0, -1, -1][:rows]
        assert got.adapter_rows[:2].tolist() == [1, 0]
        assert torch.equal(got.adapter_tiles[:2], tiles)
        assert not got.adapter_tiles[2:].any()
        assert torch.equal(got.before[:2], torch.ones(2, 2))
    decodes.left(2).fill_(5)
    decodes.fill(replace(batch, adapter_rows=None, adapter_tiles=None, before=decodes.left(2)), 4)
    assert not decodes.batch(4).adapter_tiles.any()
    assert (decodes.batch(4).before[:2] == 5).all()
    for missing in ("state_slots", "before"):
        other = replace(batch, **{missing: None})
        assert not decodes.fits(other)
        assert prompts.shape_of(other) is None


def test_each_adapter_of_a_step_has_a_tile_for_its_rest() -> None:
    for adapters in (1, 2, 5):
        parts = CapturedParts(adapters=adapters)
        for tokens in range(1, 70):
            [*_, (room, _)] = (size for size, _ in parts.fields(tokens, 1).values())
            used = min(adapters, tokens)
            sizes = [1] * (used - 1) + [tokens - used + 1]
            assert sum(-(-size // 16) for size in sizes) <= room <= tokens


def _grouped(groups: int) -> ForwardBatch:
    batch = _batch(4)
    slots, tables = batch.slot_mapping, batch.block_tables
    return replace(
        batch,
        slot_mapping=slots.expand(groups, *slots.shape),
        block_tables=tables.expand(groups, *tables.shape),
    )


@pytest.mark.skipif(not triton_runs() or torch.cuda.is_available(), reason="needs the interpreter")
def test_padded_rows_change_no_row_and_no_page() -> None:
    """Store and attend with the padding of a captured batch, beside the same without it."""
    inputs, batch = DecodeInputs(4, 4, CPU), _batch(2)
    inputs.fill(batch, 4)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, heads, 16, generator=rng) for heads in (4, 2, 2))
    pages = [torch.randn(9, 2, 4, 16, generator=rng) for _ in "kv"]
    store = kernels.rope_and_cache.implementation("triton")
    attend = kernels.paged_attention.implementation("triton")
    results = []
    for size, step in ((2, batch), (4, inputs.batch(4))):
        table = torch.ones(size, 16)
        kv = [page.clone() for page in pages]
        turned = store(q[:size], k[:size], v[:size], table, table * 0.5, *kv, step.slot_mapping)
        out = attend(turned, *kv, step.query_starts, step.context_lens, step.block_tables, 16**-0.5)
        results.append((kv, out[:2], out))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)
    assert results[1][2].isfinite().all()


def test_every_step_with_prompts_has_a_shape_that_its_kernel_attends_for() -> None:
    assert prefill_sizes(512) == (16, 32, 64, 128, 192, 256, 384, 512)
    assert prefill_shapes(0, 4) == ()
    for most, seqs in ((512, 256), (512, 3), (100, 8), (5, 4), (16, 1)):
        shapes = prefill_shapes(most, seqs)
        assert len(set(shapes)) == len(shapes)
        for tokens in range(1, most + 1):
            for count in range(1, min(tokens, seqs) + 1):
                few = has_few_queries(tokens, count)
                alike = [shape for shape in shapes if has_few_queries(*shape) == few]
                size, room = next(shape for shape in alike if shape.tokens >= tokens)
                assert room >= count
                assert size - tokens <= max(size / (2 if size <= 128 else 3), 16)


def _prompts(lengths: list[int], contexts: list[int], width: int = 3) -> ForwardBatch:
    """Sequences with that many new tokens, of contexts that long; the blocks are of 4."""
    count, tables = len(lengths), torch.arange(1, 1 + len(lengths) * width, dtype=torch.int32)
    tables = tables.view(count, width)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    spans = [torch.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
    slots = [tables[s, p // 4].long() * 4 + p % 4 for s, p in enumerate(spans)]
    return ForwardBatch(
        input_ids=torch.arange(10, 10 + int(starts[-1])),
        positions=torch.cat(spans),
        slot_mapping=torch.cat(slots),
        query_starts=starts.int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        logit_rows=starts[1:] - 1,
    )


def test_inputs_of_prompts_stay_where_they_are_and_padding_is_no_sequences() -> None:
    inputs, shape = PrefillInputs(16, 7, 4, CPU), PrefillShape(16, 7)
    before = [t.data_ptr() for t in vars_of(inputs.batch(shape))]
    inputs.fill(_prompts([5, 1, 6], [5, 9, 7]), shape)
    small = _prompts([4, 2], [4, 12])
    rows = inputs.fill(small, shape)
    got = inputs.batch(shape)
    assert [t.data_ptr() for t in vars_of(got)] == before
    for name in ("input_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(got, name)[:6], getattr(small, name)), name
    assert torch.equal(rows, small.logit_rows)
    assert torch.equal(got.block_tables[:2, :3], small.block_tables)
    assert got.slot_mapping[6:].tolist() == [-1] * 10
    assert got.query_starts.tolist() == [0, 4, *[6] * 6]
    assert got.context_lens.tolist() == [4, 12, *[0] * 5]
    assert got.logit_rows.tolist() == list(range(16))
    many_rows = replace(small, logit_rows=torch.arange(6).repeat(3))  # drawn, scored and kept
    assert torch.equal(inputs.fill(many_rows, shape), many_rows.logit_rows)
    assert inputs.shape_of(small) == (6, False)
    assert inputs.shape_of(_prompts([2, 1], [5, 9])) == (3, True)
    assert inputs.shape_of(_prompts([2], [5], width=4)) is not None
    turned = replace(small, positions=torch.zeros(3, 6, dtype=torch.int64))
    told = replace(small, adapter_rows=torch.arange(2, dtype=torch.int32))
    assert PrefillInputs(16, 7, 8, CPU).shape_of(_prompts([17], [17], width=5)) is None
    for other in (turned, told, _prompts([1] * 8, [2] * 8), _prompts([2], [5], width=5)):
        assert inputs.shape_of(other) is None


def test_prompts_have_slots_and_tables_of_each_group_of_layers() -> None:
    inputs, shape = PrefillInputs(16, 7, 4, CPU, groups=3), PrefillShape(16, 7)
    plain = _prompts([4, 2], [4, 12])
    slots = torch.stack([plain.slot_mapping + 100 * i for i in range(3)])
    tables = torch.stack([plain.block_tables + 10 * i for i in range(3)])
    batch = replace(plain, slot_mapping=slots, block_tables=tables)
    assert inputs.shape_of(plain) is None
    assert inputs.shape_of(batch) == (6, False)
    inputs.fill(batch, shape)
    got = inputs.batch(shape)
    assert torch.equal(got.slot_mapping[:, :6], slots)
    assert (got.slot_mapping[:, 6:] == -1).all()
    assert torch.equal(got.block_tables[:, :2, :3], tables)
    assert got.query_starts.tolist() == [0, 4, *[6] * 6]


@pytest.mark.skipif(not triton_runs() or torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.parametrize("lengths", [[5, 1, 6], [3, 1, 1]])
def test_padded_prompts_change_no_row_and_no_page(lengths: list[int]) -> None:
    """Store and attend with the padding of a captured step, beside the same without it."""
    batch = _prompts(lengths, [5, 9, 7])
    tokens = len(batch.input_ids)
    few = has_few_queries(tokens, 3)
    shape = next(s for s in prefill_shapes(16, 5) if has_few_queries(*s) == few)
    inputs = PrefillInputs(*shape, 4, CPU)
    inputs.fill(batch, shape)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, heads, 16, generator=rng) for heads in (4, 2, 2))
    pages = [torch.randn(10, 2, 4, 16, generator=rng) for _ in "kv"]
    store = kernels.rope_and_cache.implementation("triton")
    attend = kernels.paged_attention.implementation("triton")
    results = []
    for size, step in ((tokens, batch), (16, inputs.batch(shape))):
        table = torch.ones(size, 16)
        kv = [page.clone() for page in pages]
        turned = store(q[:size], k[:size], v[:size], table, table * 0.5, *kv, step.slot_mapping)
        out = attend(turned, *kv, step.query_starts, step.context_lens, step.block_tables, 16**-0.5)
        results.append((*kv, out[:tokens]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0 if a.dim() > 3 else 1e-6)


def test_a_cpu_captures_nothing() -> None:
    for value in ("auto", "on", True):
        assert not wants_graphs(EngineConfig(model="m", cuda_graphs=value), CPU, True)


def test_attention_without_a_kernel_is_not_captured(tmp_path: Path) -> None:
    """Its reference reads lengths on the host, and an engine would not start."""
    write_tiny(tmp_path, "deepseek_v3", num_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    config, found = ModelConfig.from_directory(tmp_path), []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, TensorParallel(), dtype, torch.device("meta"))
        sets = GraphSets(EngineConfig(model="m"), model, torch.device("cuda"), False)
        found.append(sets.wanted)
    assert found == [False, triton_runs()]


def test_all_stages_of_a_pipeline_capture_the_same_steps(tmp_path: Path) -> None:
    """The last one has no layer that cuts sequences, and its steps are those of the others."""
    write_tiny(tmp_path, "llama4", num_layers=4)
    config = ModelConfig.from_directory(tmp_path)
    models = [_stage(config, index, 4) for index in range(4)]
    assert not models[3].policy.chunk_of[0]
    assert not any(model.policy.captures_prompts for model in models)


def test_a_stage_that_cannot_capture_prompts_does_not_go_on_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no GPU to capture them on."""
    write_tiny(tmp_path, "qwen3")
    config = ModelConfig.from_directory(tmp_path)
    for count in (1, 2):
        model = _stage(config, 0, count)
        sets = GraphSets(EngineConfig(model="m", max_model_len=64), model, CPU, False)
        sets._shapes = prefill_shapes(16, 4)
        kv = KVCache(KVShape.of(config, 1, 32, torch.float32, stage=model.build.stage), CPU)
        kv.allocate(4)
        with pytest.raises(ValueError, match="cuda") if count > 1 else nullcontext():
            sets._capture_prompts(model, kv, cast(CapturePool, None))
    assert len(caplog.records) == 1


def test_a_decode_step_that_a_graph_may_hold_is_not_cut_into_parts(tmp_path: Path) -> None:
    """Rank 0 draws from its graph of the whole step, before it would look for parts."""
    write_tiny(tmp_path, "qwen3")
    config, cut = ModelConfig.from_directory(tmp_path), list[int]()

    def in_turn(parts: list[ForwardBatch], kv: object) -> torch.Tensor:
        cut.append(len(parts))
        return torch.zeros(sum(len(part.logit_rows) for part in parts), 1)

    for wanted in (True, False):
        rank: Any = SimpleNamespace(
            device=CPU, stage=Stage(1, 2), model_config=config, kv=SimpleNamespace(layers=[]),
            _graphs=SimpleNamespace(wanted=wanted), _to_device=lambda part: part,
        )  # fmt: skip
        policy: Any = SimpleNamespace(in_turn=in_turn)
        assert (
            ModelRunner._in_parts(rank, policy, _batch(300, contexts=(5,) * 300)) is None
        ) == wanted
    assert cut == [4]


def _stage(config: ModelConfig, index: int, count: int) -> Model:
    meta = torch.device("meta")
    return build_model(config, TensorParallel(), torch.float32, meta, stage=Stage(index, count))


def test_settings_that_make_no_sense_are_refused() -> None:
    assert EngineConfig(model="m", cuda_graphs=False).cuda_graphs == "off"
    assert EngineConfig(model="m", cuda_graph_sizes=[4, 1, 4]).cuda_graph_sizes == (1, 4)
    with pytest.raises(ConfigError, match="cuda_graphs must be one of"):
        EngineConfig(model="m", cuda_graphs="maybe")
    with pytest.raises(ConfigError, match="cuda_graph_sizes"):
        EngineConfig(model="m", cuda_graph_sizes=(0,))
    with pytest.raises(ConfigError, match="cuda_graph_prefill must be an integer, 0 or more"):
        EngineConfig(model="m", cuda_graph_prefill=-1)


def vars_of(batch: ForwardBatch) -> list[torch.Tensor]:
    found = [getattr(batch, name) for name in ForwardBatch.__slots__]
    return [x for x in found if x is not None]


def _builder(path: Path) -> Callable[[torch.device], Model]:
    config = ModelConfig.from_directory(path)

    def build(device: torch.device) -> Model:
        return build_model(config, TensorParallel(), torch.float32, device)

    return build


def test_an_update_beside_the_first_step_after_a_sleep_loads_the_shadow_of_that_step(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread makes it to capture over it; a second one would take the memory of a model,
    and a commit would go on without graphs.
    """
    build = _builder(tiny_qwen3)
    live = build(CPU)
    instances = ModelInstances(live, build, CPU)
    begun, go_on, make = threading.Event(), threading.Event(), live.empty_like

    def slowly() -> Model:
        begun.set()
        assert go_on.wait(30)
        return make()

    def step() -> Model | None:
        with torch.inference_mode():
            return instances.prepare_shadow()

    monkeypatch.setattr(live, "empty_like", slowly)
    with ThreadPoolExecutor(2) as threads:
        captured = threads.submit(step)
        assert begun.wait(30)
        load = threads.submit(instances.open_shadow, True)
        time.sleep(0.2)  # in which it comes to where it waits
        go_on.set()
        assert load.result(30) is not None
        assert captured.result(30) is instances.instance(live=False)


def test_a_pinned_instance_keeps_its_addresses_over_a_commit(tiny_qwen3: Path) -> None:
    build = _builder(tiny_qwen3)
    live = build(CPU)
    for parameter in live.parameters():
        parameter.data.normal_()
    instances = ModelInstances(live, build, CPU, pinned=True)
    addresses = [p.data_ptr() for p in live.parameters()]
    old = [p.data.clone() for p in live.parameters()]
    load = instances.open_shadow(partial=True)
    assert load is not None
    shadow = instances._shadow
    assert shadow is not None
    for parameter in shadow.parameters():
        parameter.data.add_(1)
    instances.commit()
    assert instances.live is live
    assert [p.data_ptr() for p in live.parameters()] == addresses
    for parameter, before in zip(live.parameters(), old, strict=True):
        torch.testing.assert_close(parameter.data, before + 1)
    instances.go_back()
    assert all(torch.equal(p.data, b) for p, b in zip(live.parameters(), old, strict=True))

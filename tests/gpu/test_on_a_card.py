"""What only a card can show; skipped where there is none."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from card_engines import (
    GREEDY,
    PRETENDED,
    PROMPTS,
    SPECIAL,
    card_engine,
    card_settings,
    greedy_tokens,
    plain_model,
)
from tiny_models import write_tiny

from rollout import AsyncRollout, Rollout, SamplingParams
from rollout.engine.sampling.fused_sampler import has_filters
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.worker import weight_instances
from rollout.engine.worker.graphs import draw_graphs
from rollout.engine.worker.graphs.decode_graphs import DecodeGraphs
from rollout.engine.worker.graphs.draw_graphs import CapturePool, DrawGraphs, capture
from rollout.errors import ChecksumMismatch, EngineClosed, TransferFailed
from rollout.integrations.fan_out import FanOut
from rollout.kernels import copy_regions, digest_regions, gpu_launch
from rollout.loader.dummy import DummyFiles
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.delta import decode
from rollout.weight_sync.protocol.messages import BucketEntry, WeightInfo
from rollout.weight_sync.trainer.weight_report import WeightReport
from rollout.weight_sync.transports import lent_memory
from rollout.weight_sync.transports.cuda_ipc import CudaIpcSender
from rollout.weight_sync.transports.cuda_memory import own_handles
from rollout.weights import Box, TensorMeta
from rollout.weights.quantization import SCHEMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
RANKS = 2
SENDER = """
import sys
from safetensors.torch import load_file
from rollout import Rollout
read = load_file(sys.argv[2] + "/model.safetensors")
held = {name: x.mul_(1.5).cuda() for name, x in read.items()}
if sys.argv[4:] == ["made here"]:  # in memory that torch's allocator made, not moved to it
    held = {name: x * 1 for name, x in held.items()}
with Rollout.connect(sys.argv[1]) as engine:
    receipt = engine.update_weights(held, transport=sys.argv[3])
    told = receipt.details
    print(told.get("packed_because"), told.get("read_in_place"), receipt.num_tensors, sep="|")
    print(receipt.transport)
"""
# Processes that announce where their tensors lie and are gone: ranks find them, nothing, or half.
DIE = """
import os, signal, sys, threading, time
import safetensors.torch, rollout.api.sync_rollout
from rollout.weight_sync.trainer.weight_report import WeightReport
from rollout.weight_sync.transports.cuda_ipc import CudaIpcSender
announce = CudaIpcSender.in_place
def die(self, channel, header, regions):
    kill = threading.Timer(wait, lambda: os.kill(os.getpid(), signal.SIGKILL))
    kill.start()
    announce(self, channel, header, regions)
    time.sleep(60)
CudaIpcSender.in_place = die
for wait in map(float, sys.argv[4].split(",")):
    if (child := os.fork()) == 0:
        del sys.argv[4:]
        exec(SENDER)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_captured_decoding_gives_what_plain_decoding_gives(tiny_qwen3: Path) -> None:
    with card_engine(tiny_qwen3, cuda_graphs="on") as captured:
        ours = greedy_tokens(captured)
    with card_engine(tiny_qwen3, cuda_graphs="off") as plain:
        assert greedy_tokens(plain) == ours
    with card_engine(tiny_qwen3, cuda_graphs="on", executor="multiprocess") as apart:
        assert greedy_tokens(apart) == ours
        [alone] = apart.generate(PROMPTS[:1], GREEDY)
        assert alone.outputs[0].token_ids == ours[0]


@pytest.mark.skipif(PRETENDED, reason="the interpreter launches one kernel after the other")
def test_overlapping_kernels_give_the_bits_of_kernels_in_turn(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for overlap in (True, False):
        if not overlap:
            monkeypatch.setattr(gpu_launch, "overlaps", lambda _: False)
        with card_engine(tiny_qwen3, staging="none") as engine:
            found.append([out.outputs[0].logprobs for out in engine.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]


# Calls that a captured draw takes, with filters and without, and one with a row that is drawn from
# other logits than the model's.
FILTERED = {"top_p": 0.7, "top_k": 40, "min_p": 0.02}
DRAWS = (
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 3},
        {**FILTERED, "temperature": 0.8, "seed": 4, "return_sampling_mask": True},
    ],
    [{"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6, "logprobs": 2}],
    [{"temperature": 1.1, "seed": 7}, {"temperature": 0.9, "seed": 8, "presence_penalty": 0.5}],
)


def _drawn(engine: Rollout) -> list[Any]:
    found = []
    for call in DRAWS:
        params = [SamplingParams(max_tokens=3, ignore_eos=True, **one) for one in call]
        outputs = engine.generate(PROMPTS[: len(call)], params)
        for [sample] in (out.outputs for out in outputs):
            mask = sample.sampling_mask
            kept = None if mask is None else (mask.counts.tolist(), mask.token_ids.tolist())
            found.append((sample.token_ids, sample.logprobs, kept))
    return found


@pytest.fixture(scope="module")
def drawn_outside(tiny_qwen3: Path) -> list[Any]:
    """By the sampler, in turn, from captured logits."""
    settings = {"cuda_graphs": "forward", "async_scheduling": False, "staging": "none"}
    with card_engine(tiny_qwen3, **settings) as engine, pytest.MonkeyPatch.context() as patch:
        patch.delattr(DrawGraphs, "replay")
        return _drawn(engine)


def test_a_captured_draw_gives_the_samplers_bits(
    tiny_qwen3: Path, drawn_outside: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logprobs, with steps begun ahead, and beside steps that it does not take."""
    sizes, replay = [], DrawGraphs.replay

    def noted(graphs: DrawGraphs, size: int, sampling: SamplingMetadata) -> Any:
        sizes.append((size, sampling.num_rows, has_filters(sampling)))
        return replay(graphs, size, sampling)

    monkeypatch.setattr(DrawGraphs, "replay", noted)
    with card_engine(tiny_qwen3, cuda_graphs="on", staging="none") as engine:
        assert _drawn(engine) == drawn_outside
        assert engine._async.backend.core.loop.steps_ahead > 0
    # The first token of each came with its prompt.
    assert sizes == [(4, 3, True)] * 2 + [(4, 2, False)] * 2
    assert all(0 < count < 40 for count in drawn_outside[2][2][0])


def test_where_the_draw_cannot_be_captured_the_rest_is(
    tiny_qwen3: Path,
    drawn_outside: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, sample = [], draw_graphs.sample

    def waits(*args: Any, **options: Any) -> Any:
        made.append(args)
        found = sample(*args, **options)
        if len(made) > 2:  # it runs, but not when it is captured
            found[0].tolist()
        return found

    monkeypatch.setattr(draw_graphs, "sample", waits)
    with card_engine(tiny_qwen3, cuda_graphs="on") as engine:
        assert _drawn(engine) == drawn_outside
    told = [line for line in caplog.records if "the sampler is not captured" in line.message]
    assert len(told) == 1  # for both sets


def test_after_a_capture_that_fails_work_and_captures_go_on_as_before() -> None:
    """On the stream before it; torch may refuse what goes into the same memory."""
    x, stream = torch.ones(2).cuda(), torch.cuda.current_stream()
    pool = CapturePool(x.device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            capture(lambda: x.sum().item(), pool)
        assert torch.cuda.current_stream() == stream
    graph, found = capture(lambda: x + 1, pool)
    x += 1
    graph.replay()
    assert found.tolist() == [3, 3]


def test_steps_begun_ahead_in_another_process_draw_the_same(
    tiny_qwen3: Path, drawn_outside: list[Any]
) -> None:
    """As is the default, also while the third prompt waits for a place."""
    settings = {"max_num_seqs": 2, "cuda_graph_sizes": (2,), "staging": "none"}
    with card_engine(tiny_qwen3, executor="multiprocess", **settings) as ahead:
        found = [token_ids for token_ids, *_ in _drawn(ahead)]
        loop = ahead._async.backend.core.loop
        assert loop.steps_ahead > 2 + 2  # while it runs alone, and the two of the second call
    assert found == [token_ids for token_ids, *_ in drawn_outside]


def test_graphs_survive_updates_and_sleeps(tiny_qwen3: Path, trained: Any) -> None:
    """The tokens after each are those of an engine that never captured anything."""
    with card_engine(tiny_qwen3, cuda_graphs="off") as plain:
        before = greedy_tokens(plain)
        plain.update_weights(trained)
        after = greedy_tokens(plain)
    with card_engine(tiny_qwen3, cuda_graphs="on") as engine:
        assert greedy_tokens(engine) == before
        engine.update_weights(trained)
        assert greedy_tokens(engine) == after
        engine.rollback()
        assert greedy_tokens(engine) == before
        engine.sleep(level=1)
        engine.wake_up()
        assert greedy_tokens(engine) == before
        engine.update_weights(trained)  # the weights lie elsewhere than at the last one
        assert greedy_tokens(engine) == after
        assert not engine.check_weights(trained).differing
        engine.sleep(level=2)
        engine.wake_up()
        engine.update_weights(trained)
        assert greedy_tokens(engine) == after


def test_a_commit_goes_on_with_the_other_set_of_graphs_and_moves_no_byte(
    tiny_qwen3: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sets give the same bits: tokens, and all three logprobs of each."""
    replays, replay = [], DecodeGraphs._replay

    def noted(graphs: DecodeGraphs, *args: Any) -> Any:
        replays.append(id(graphs))
        return replay(graphs, *args)

    def no_exchange(*_: Any) -> None:
        raise AssertionError("contents were exchanged")

    monkeypatch.setattr(DecodeGraphs, "_replay", noted)
    monkeypatch.setattr(weight_instances, "exchange", no_exchange)
    with card_engine(tiny_qwen3, cuda_graphs="on") as engine:
        before = engine.generate(PROMPTS, GREEDY)
        seen = []
        for _ in range(2 if PRETENDED else 3):
            engine.update_weights(trained)
            replays.clear()
            seen.append([out.outputs[0] for out in engine.generate(PROMPTS, GREEDY)])
            seen[-1].append(set(replays))
        *first, one = seen[0]
        *second, other = seen[1]
        assert len(one) == len(other) == 1
        assert one != other
        assert [turn[-1] for turn in seen] == [one, other, one][: len(seen)]
        for turn in (second, *(turn[:-1] for turn in seen[2:])):
            for a, b in zip(first, turn, strict=True):
                assert a.token_ids == b.token_ids
                assert a.logprobs == b.logprobs
        engine.update_weights(plain_model(tiny_qwen3))
        engine.rollback()
        assert [out.outputs[0].token_ids for out in engine.generate(PROMPTS, GREEDY)] == [
            a.token_ids for a in first
        ]
        engine.update_weights(plain_model(tiny_qwen3))
        after = [out.outputs[0] for out in engine.generate(PROMPTS, GREEDY)]
        assert [a.logprobs for a in after] == [out.outputs[0].logprobs for out in before]


def _outputs(engine: Rollout) -> list[Any]:
    return [out for params in (GREEDY, SPECIAL) for out in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "arch", ["llama", "qwen2", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v32"]
)
def test_every_architecture_gives_what_a_cpu_gives(tmp_path: Path, arch: str) -> None:
    write_tiny(tmp_path, arch, num_layers=1, vocab_size=96)
    with card_engine(tmp_path, cuda_graph_prefill=16) as card:
        ours = _outputs(card)
    with card_engine(tmp_path, device="cpu") as host:
        wanted = _outputs(host)
    for a, b in zip(ours, wanted, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        assert x.token_ids == y.token_ids
        for name in ("raw", "processed", "log_kept_mass"):
            pair = [torch.tensor(getattr(out.logprobs, name)) for out in (x, y)]
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)
        assert [list(top) for top in x.logprobs.top or ()] == [
            list(t) for t in y.logprobs.top or ()
        ]


def test_layers_with_windows_and_without_give_what_a_cpu_gives(tmp_path: Path) -> None:
    """Captured, each with block tables of its own; beyond several windows."""
    write_tiny(tmp_path, "gemma2", vocab_size=96)
    prompts = [[(5 * i + j) % 96 for j in range(18 + i)] for i in range(2)]
    found = []
    for device, graphs in (("cuda", "on"), ("cpu", "auto")):
        with card_engine(tmp_path, device=device, cuda_graphs=graphs, block_size=4) as engine:
            found.append([out.outputs[0] for out in engine.generate(prompts, GREEDY)])
    for ours, wanted in zip(*found, strict=True):
        assert ours.token_ids == wanted.token_ids
        pair = [torch.tensor(each.logprobs.raw) for each in (ours, wanted)]
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# Sinks, windows and chunks that act, states, and what else sets the layers of others apart.
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_layers": 1},
    "llama4": {"num_hidden_layers": 1, "moe_layers": [0], "attention_chunk_size": 4},
    "qwen3_next": {**HYBRID, "mlp_only_layers": []},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
    "kimi_linear": {**HYBRID, "mlp_layer_types": ["dense", "sparse"]},
    "glm4_moe": {"num_layers": 1},
    "cohere2": {"num_hidden_layers": 1, "sliding_window": 3},
    "phi3": {"num_layers": 1, "sliding_window": 3},
    "olmo2": {"num_layers": 1},
    "minimax_m2": {"num_layers": 1},
}


@pytest.mark.parametrize("arch", LAYERS)
def test_every_kind_of_layer_gives_what_a_cpu_gives(tmp_path: Path, arch: str) -> None:
    write_tiny(tmp_path, arch, vocab_size=96, **LAYERS[arch])
    prompts = [[5, 9, 2, 7, 7, 3, 1, 8, 2], [4]]
    asked = replace(GREEDY, max_tokens=2)
    settings = {"block_size": 4, "staging": "none"}
    if PRETENDED:  # of what takes the interpreter long no more than is shown here
        settings |= {"cuda_graphs": "off", "check_finite": False}
    found = []
    for device in ("cuda", "cpu"):
        with card_engine(tmp_path, device=device, **settings) as engine:
            found.append([out.outputs[0] for out in engine.generate(prompts, asked)])
    for ours, wanted in zip(*found, strict=True):
        assert ours.token_ids == wanted.token_ids
        pair = [torch.tensor(each.logprobs.raw) for each in (ours, wanted)]
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "staged on the host": ({"staging": "host"}, {}),
    "not staged, a copy kept": ({"undo": "host"}, {"staging": "none"}),
    "differences kept": ({"undo": "sparse"}, {}),
    "changes alone": ({}, {"encoding": "delta"}),
    "changes alone, of tensors on the card": ({}, {"encoding": "delta"}),
    "instances that swap": ({"cuda_graphs": "off"}, {}),
    "running requests computed anew": ({}, {"in_flight": "recompute"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_updating_gives_the_weights_sent(tiny_qwen3: Path, way: str) -> None:
    settings, options = WAYS[way]
    first, second = plain_model(tiny_qwen3), plain_model(tiny_qwen3)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.view(-1)[::7] *= 1.5
    if "on the card" in way:
        first, second = first.cuda(), second.cuda()
    with card_engine(tiny_qwen3, **settings) as engine:
        before = greedy_tokens(engine)
        engine.update_weights(second, **options)
        after = greedy_tokens(engine)
        assert after != before
        receipt = engine.update_weights(first, **options)
        assert (receipt.wire_bytes < receipt.num_bytes) == ("encoding" in options)
        assert greedy_tokens(engine) == before
        engine.rollback()
        assert greedy_tokens(engine) == after
        assert not engine.check_weights(second).differing


def test_changes_are_found_coded_and_read_on_the_card() -> None:
    """As a CPU does it, against a copy in pinned host memory."""
    box = Box.full((300, 70))
    old, new = torch.zeros(box.shape), torch.zeros(box.shape)
    new.view(-1)[::300] = 2.5  # gaps of one byte with escapes
    coded = {}
    for device in ("cpu", "cuda"):
        copies = Committed()
        copies.keep("x", box, old.to(device))
        found = copies.change("x", box, new.to(device), 1 << 20)
        assert found is not None
        assert found.codes.device.type == device
        held = copies.values["x", box]
        assert held.device.type == "cpu"
        assert held.is_pinned() == (device == "cuda") or PRETENDED
        assert torch.equal(held, new)
        coded[device] = found.coded()
    assert torch.equal(coded["cuda"].data.cpu(), coded["cpu"].data)
    delta = coded["cuda"]
    entry = BucketEntry(
        "x", delta.dtype, delta.shape, box, 0, delta.nbytes, delta.width, delta.count
    )
    patch = decode(entry, delta.data)
    assert patch.positions.is_cuda
    read = torch.zeros(box.shape).cuda()
    read.view(-1)[patch.positions] = patch.values
    assert torch.equal(read.cpu(), new)


def test_made_up_weights_are_those_of_a_cpu() -> None:
    meta = TensorMeta("x.norm.weight", torch.bfloat16, (70, 41))
    box = Box((3, 5), (70, 40))
    here, there = (
        DummyFiles([meta], 7, torch.device(d)).read(meta.name, box) for d in ("cpu", "cuda")
    )
    assert there.is_cuda
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_quantised_on_a_card_as_on_a_cpu(name: str) -> None:
    """Bit for bit: a shadow in host memory is quantised there, a fresh start's weights on it."""
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    wanted = SCHEMES[name].quantize(values)
    found = SCHEMES[name].quantize(values.cuda())
    assert [torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True)] == [True, True]


def test_heads_that_have_no_kernel_give_what_a_cpu_gives(tmp_path: Path) -> None:
    write_tiny(tmp_path, "deepseek_v3", num_layers=1, vocab_size=96, kv_lora_rank=512,
               qk_rope_head_dim=64)  # fmt: skip
    found = []
    for device in ("cuda", "cpu"):
        with card_engine(tmp_path, device=device, staging="none") as engine:
            found.append(greedy_tokens(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "arch"),
    [("mxfp4", "qwen3"), ("fp8_block", "qwen3"), ("fp8", "qwen3_moe"), ("int8", "qwen3_moe")],
)
def test_weights_that_captured_steps_dequantise_give_what_a_cpu_gives(
    tmp_path: Path, name: str, arch: str
) -> None:
    write_tiny(tmp_path, arch, num_layers=1, vocab_size=96)
    found = []
    for device, graphs in (("cuda", "on"), ("cpu", "auto")):
        settings = {"device": device, "cuda_graphs": graphs, "quantization": name}
        with card_engine(tmp_path, **settings, staging="none") as engine:
            found.append(greedy_tokens(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "arch"), [("int8", "qwen3"), ("fp8", "deepseek_v32")])
def test_keys_and_values_in_8_bits_give_what_a_cpu_gives(
    tmp_path: Path, kind: str, arch: str
) -> None:
    """Captured, decodes and prompts, and after a sleep, which takes other memory."""
    write_tiny(tmp_path, arch, num_layers=1, vocab_size=96)
    settings = {"kv_cache_dtype": kind, "cuda_graph_prefill": 16, "block_size": 4}
    found = []
    for device in ("cuda", "cpu"):
        with card_engine(tmp_path, device=device, **settings) as engine:
            found.append([out.outputs[0] for out in engine.generate(PROMPTS, GREEDY)])
            engine.sleep()
            engine.wake_up()
            found[-1] += [out.outputs[0] for out in engine.generate(PROMPTS[::-1], GREEDY)]
    for ours, wanted in zip(*found, strict=True):
        assert ours.token_ids == wanted.token_ids
        pair = [torch.tensor(each.logprobs.raw) for each in (ours, wanted)]
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs a card for each rank")
def test_two_ranks_give_what_one_gives(tiny_qwen3: Path, trained: Any) -> None:
    """With captured collectives, before and after an update."""
    with card_engine(tiny_qwen3, device="cpu") as one:
        before = greedy_tokens(one)
        one.update_weights(trained)
        after = greedy_tokens(one)
    settings = {"cuda_graphs": "on", "cuda_graph_prefill": 16}
    with card_engine(tiny_qwen3, tensor_parallel_size=RANKS, **settings) as two:
        assert greedy_tokens(two) == before
        two.update_weights(trained)
        assert greedy_tokens(two) == after
        for model, wanted in ((plain_model(tiny_qwen3), before), (trained, after)):
            two.update_weights(model, staging="none")  # what a step may read is not written
            assert greedy_tokens(two) == wanted


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs a card for each rank")
def test_two_stages_give_what_one_gives(tmp_path: Path) -> None:
    """With captured steps that are handed on, and without, before and after an update."""
    sizes = {"num_layers": 2, "vocab_size": 96, "intermediate_size": 64}
    write_tiny(tmp_path, "qwen3", dtype=torch.float32, **sizes)
    changed = {name: x * 1.5 for name, x in plain_model(tmp_path).state_dict().items()}
    told = []
    for settings in (
        {"device": "cpu"},
        *({"pipeline_parallel_size": 2, "cuda_graphs": graphs} for graphs in ("on", "off")),
    ):
        with card_engine(tmp_path, cuda_graph_prefill=16, **settings) as engine:
            told.append([greedy_tokens(engine)])
            engine.update_weights(changed)
            told[-1].append(greedy_tokens(engine))
    assert told[0] == told[1] == told[2]
    assert told[0][0] != told[0][1]


# A process of a job whose ranks are one engine's, each on its own card.
RANK = """
import json, sys, torch, torch.distributed as dist
from safetensors.torch import load_file
from card_engines import GREEDY, PROMPTS, card_settings
from rollout import Rollout
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.trainer import mapped_shards, resharded_boxes
from rollout.weights import Box, TensorMeta
path, meet, rank = sys.argv[1:]
class Done:
    def is_completed(self):
        return True
    def wait(self):
        pass
def exchange(into, payload, coming, leaving):  # NCCL's part by gloo, in host memory
    got = torch.empty(sum(coming), dtype=torch.uint8)
    dist.all_to_all_single(got, payload.cpu(), coming, leaving)
    into.copy_(got)
    return Done()
mapped_shards.why_not_exchanged, resharded_boxes.exchange = lambda ranks: "", exchange
dist.init_process_group("gloo", init_method="file://" + meet, rank=int(rank), world_size=2)
torch.cuda.set_device(int(rank) % torch.cuda.device_count())
first = load_file(path + "/model.safetensors")
held = {name: x.mul(1.5).cuda() for name, x in first.items()}
class Rows:  # of which this rank has its half, in memory of its own card
    def __init__(self):
        self.agreement = Agreement.over((0, 1), 60.0)
        self.halves = {}
        for name, x in first.items():
            at, of = int(rank), len(x) // 2
            box = Box((at * of,) + (0,) * (x.dim() - 1), ((at + 1) * of,) + tuple(x.shape[1:]))
            self.halves[name] = [(box, x[box.slices].cuda())]
    def metadata(self):
        return tuple(TensorMeta(name, x.dtype, tuple(x.shape)) for name, x in first.items())
    def local_boxes(self):
        return [(name, [box for box, _ in found]) for name, found in self.halves.items()]
    def local_values(self, name):
        return self.halves[name]
    held_values = local_values
    def __iter__(self):
        raise AssertionError("this update gathers")
class Apart(Rows):  # which cannot be mapped there
    def held_values(self, name):
        return None
told = []
with Rollout.from_ranks(path, **card_settings(cuda_graphs="off")) as ranks:
    for source in (None, held, Rows(), held, Apart(), held, Rows(), Apart()):
        receipt = ranks.update_weights(source) if source else None
        tokens = [out.outputs[0].token_ids for out in ranks.generate(PROMPTS, GREEDY)]
        how = receipt and [receipt.transport, receipt.details.get("read_in_place")]
        told.append([tokens, how])
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs a card for each rank")
@pytest.mark.parametrize("alone", [False, True], ids=["", "each sees its own alone"])
def test_processes_of_a_job_are_ranks_on_cards_and_map_what_they_hold_or_bring(
    tiny_qwen3: Path, trained: Any, tmp_path: Path, alone: bool
) -> None:
    with card_engine(tiny_qwen3, device="cpu") as one:
        wanted = [greedy_tokens(one)]
        one.update_weights(trained)
        wanted.append(greedy_tokens(one))
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", RANK, str(tiny_qwen3), str(tmp_path / "meet")]
    jobs = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**env, "CUDA_VISIBLE_DEVICES": str(rank)} if alone else env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [job.communicate(timeout=240)[0].splitlines()[-1:] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    count = len(trained.state_dict())
    whole, halves = f"{count} tensors", f"{2 * count} boxes of {count} tensors"
    apart = [wanted[0], ["reshard", None]]
    first, second = ([wanted[0], ["ipc", halves]], [wanted[1], ["ipc", whole]])
    if alone:  # the others do not see what a dict of the first rank's holds
        first, second = apart, [wanted[1], ["inline", None]]
    course = [[wanted[0], None], second, first, second, apart, second, first, apart]
    assert [json.loads(line) for [line] in told] == [course] * RANKS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_process_of_a_job_that_is_an_engine_of_its_own_runs_it_on_its_own_card(
    tiny_qwen3: Path, trained: Any
) -> None:
    with card_engine(tiny_qwen3) as first:
        wanted = greedy_tokens(first)
    torch.cuda.set_device(1)
    try:
        with Rollout.from_ranks(str(tiny_qwen3), **card_settings()) as ranks:
            assert ranks.engine._async.backend.core.rank_info[0]["device"] == "cuda:1"
            assert [out.outputs[0].token_ids for out in ranks.generate(PROMPTS, GREEDY)] == wanted
            held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
            receipt = ranks.update_weights(held)
            assert receipt.details["read_in_place"] == f"{receipt.num_tensors} tensors"
    finally:
        torch.cuda.set_device(0)


def test_sleep_gives_the_device_its_memory_back(tiny_qwen3: Path) -> None:
    with card_engine(tiny_qwen3, kv_cache_bytes=1 << 30) as engine:
        greedy_tokens(engine)
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep(level=1)
        assert torch.cuda.mem_get_info()[0] - awake > 0.9 * (1 << 30)
        engine.wake_up()
        assert greedy_tokens(engine)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_an_update_while_the_weights_are_in_host_memory_is_refused(
    tiny_qwen3: Path, trained: Any, graphs: str
) -> None:
    """It would be lost when they come back."""
    with card_engine(tiny_qwen3, cuda_graphs=graphs) as engine:
        before = greedy_tokens(engine)
        engine.sleep(level=1)
        for staging in ("auto", "none"):
            with pytest.raises(EngineClosed, match=r"wake_up\(tags=\['weights'\]\) first"):
                engine.update_weights(trained, staging=staging)
        engine.wake_up()
        assert engine.weight_version == 0
        assert greedy_tokens(engine) == before
        engine.sleep(level=1)
        engine.wake_up(["weights"])
        engine.update_weights(trained)
        engine.wake_up(["kv_cache"])
        assert greedy_tokens(engine) != before
        assert not engine.check_weights(trained).differing
        engine.sleep(level=2)  # none are there
        for _ in range(2):
            engine.update_weights(trained)
        assert not engine.check_weights(trained).differing


def _send(engine: Rollout, path: Path, code: str, *arguments: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, engine.address, str(path), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("transport", ["ipc", "auto", "inline"])
def test_another_process_on_the_same_gpu_updates_the_engine(
    tiny_qwen3: Path, transport: str
) -> None:
    """Its tensors are read where they lie; the process may have another version of torch."""
    with card_engine(tiny_qwen3) as engine:
        before = greedy_tokens(engine)
        told, took = _send(engine, tiny_qwen3, SENDER, transport)
        assert took == ("ipc" if transport == "auto" else transport)
        packed, in_place, count = told.split("|")
        assert in_place == ("None" if transport == "inline" else f"{count} tensors")
        assert (packed == "None") == (transport != "inline")
        assert engine.weight_version == 1
        assert greedy_tokens(engine) != before


def test_a_rank_in_the_senders_own_process_reads_what_others_map(
    tiny_qwen3: Path, trained: Any
) -> None:
    """CUDA opens no handle in the process that it is of, as the first of ``from_ranks`` would."""
    held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
    apart = {name: x.mT.contiguous().mT if x.dim() > 1 else x for name, x in held.items()}
    with card_engine(tiny_qwen3) as engine, Rollout.connect(engine.address) as there:
        for source in (held, apart):  # where it lies, and packed
            receipt = there.update_weights(source, transport="ipc")
            assert receipt.transport == "ipc"
            assert ("packed_because" in receipt.details) == (source is apart)
            assert not engine.check_weights(trained).differing
    assert not own_handles()


def test_memory_that_cannot_be_mapped_is_packed_and_the_receipt_says_why(tiny_qwen3: Path) -> None:
    with card_engine(tiny_qwen3) as engine:
        before = greedy_tokens(engine)
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        told, took = _send(engine, tiny_qwen3, SENDER, "ipc", "made here", **allocator)
        assert took == "ipc"
        packed, in_place, _ = told.split("|")
        assert in_place == "None"
        assert "its memory cannot be mapped" in packed
        assert greedy_tokens(engine) != before


def test_buckets_that_nothing_will_be_packed_into_take_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is none even for that, nothing is left of what was to be mapped."""
    info = WeightInfo(
        epoch=1,
        version=0,
        label=None,
        state="idle",
        dtype=torch.bfloat16,
        tensors=(TensorMeta("w", torch.bfloat16, (2048, 2048)),),
        aliases={},
        tensor_parallel_size=1,
        device="cuda:0",
        transports=("ipc",),
    )
    held = torch.ones(8, 8).cuda()
    for staying, nbytes in (([held], 1 << 20), ([held, held[:, :4]], 4 << 20), ([], 4 << 20)):
        sender = CudaIpcSender(info, 4 << 20, 1.0, lambda staying=staying: staying)
        assert [buffer.numel() for buffer in sender.buffers] == [nbytes] * 2
        sender.close()
    monkeypatch.setattr(lent_memory, "FLAGS", 1 << 60)
    with pytest.raises(TransferFailed):
        CudaIpcSender(info, 4 << 20, 1.0, lambda: [held])
    assert not own_handles()


@pytest.mark.timeout(600)
def test_a_trainer_that_is_killed_while_ranks_read_its_memory_costs_the_update_alone(
    tiny_qwen3: Path,
) -> None:
    times = (15,) if PRETENDED else range(30)
    waits = ",".join(f"{0.05 * n / 30:.4f}" for n in times)
    with card_engine(tiny_qwen3) as engine:
        before = greedy_tokens(engine)
        _send(engine, tiny_qwen3, f"SENDER = {SENDER!r}{DIE}", "ipc", waits)
        assert engine.weight_version == 0
        assert greedy_tokens(engine) == before
        engine.update_weights(plain_model(tiny_qwen3))  # nobody holds the lease any more
        assert greedy_tokens(engine) == before


def test_updates_leave_the_devices_memory_as_it_was(tiny_qwen3: Path, trained: Any) -> None:
    """In place and through the host, with what torch keeps given back in between."""
    held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
    with card_engine(tiny_qwen3) as engine:
        engine.update_weights(held)
        engine.update_weights(trained)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(1 if PRETENDED else 50):
            engine.update_weights(held)
            engine.update_weights(trained)
            torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= free - (4 << 20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_on_the_engines_own_device_reads_the_tensors_where_they_lie(
    tiny_qwen3: Path, trained: Any, dtype: str
) -> None:
    """Cast on the way; what is not contiguous, or elsewhere, is packed, and the receipt says so."""
    held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
    with card_engine(tiny_qwen3, dtype=dtype) as engine:
        engine.update_weights(trained)  # from the host
        wanted = greedy_tokens(engine)
        for _ in range(2):  # the second finds the tables of the first
            receipt = engine.update_weights(held)
            assert receipt.details["read_in_place"] == f"{receipt.num_tensors} tensors"
            assert "packed_because" not in receipt.details
            assert greedy_tokens(engine) == wanted
        odd = {
            name: x.mT.contiguous().mT if name.endswith("q_proj.weight") else x
            for name, x in held.items()
        }
        receipt = engine.update_weights(
            {**odd, "model.norm.weight": held["model.norm.weight"].cpu()}
        )
        assert receipt.details["read_in_place"] == f"{receipt.num_tensors - 2} tensors"
        assert receipt.details["packed_because"] == "it is not contiguous"
        assert greedy_tokens(engine) == wanted
        assert not engine.check_weights(trained).differing


@pytest.mark.parametrize("transport", ["inline", "ipc"])
def test_an_update_sends_what_the_stream_that_asks_for_it_will_have_written(
    tiny_qwen3: Path, trained: Any, transport: str
) -> None:
    """As anything of torch does, though threads of its own take part."""
    held = {name: x.detach().cuda() / 2 for name, x in trained.state_dict().items()}
    if transport == "ipc":  # packed, as half of it could not be mapped
        held = {name: x.mT.contiguous().mT if x.dim() > 1 else x for name, x in held.items()}
    where = {"executor": "multiprocess"} if transport == "ipc" else {}
    with card_engine(tiny_qwen3, cuda_graphs="off", **where) as engine:
        with _trained_late(held):
            receipt = engine.update_weights(held, transport=transport)
        assert receipt.transport == transport
        assert not engine.check_weights(trained).differing


def test_an_awaited_update_sends_what_its_stream_will_have_written(
    tiny_qwen3: Path, trained: Any
) -> None:
    held = {name: x.detach().cuda() / 2 for name, x in trained.state_dict().items()}

    async def update() -> WeightReport:
        settings = card_settings(cuda_graphs="off")
        async with AsyncRollout(str(tiny_qwen3), **settings) as engine:
            with _trained_late(held):
                await engine.update_weights(held)
            return await engine.check_weights(trained)

    assert not asyncio.run(update()).differing


def test_an_update_of_several_engines_sends_what_its_stream_will_have_written(
    tiny_qwen3: Path, trained: Any
) -> None:
    held = {name: x.detach().cuda() / 2 for name, x in trained.state_dict().items()}
    plain = {"cuda_graphs": "off"}
    with card_engine(tiny_qwen3, **plain) as one, card_engine(tiny_qwen3, **plain) as other:
        fan_out = FanOut({one.address: None, other.address: None})
        try:
            with _trained_late(held):
                fan_out.update(iter(held.items()))
        finally:
            fan_out.close()
        for engine in (one, other):
            assert not engine.check_weights(trained).differing


@contextmanager
def _trained_late(held: dict[str, torch.Tensor]) -> Iterator[None]:
    """On a stream that has twice those values in half a second."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def train() -> None:
        for value in held.values():
            value.mul_(2)

    with torch.cuda.stream(stream):
        if PRETENDED:
            stream.do_late(train)  # type: ignore[attr-defined]
        else:
            torch.cuda._sleep(1 << 30)
            train()
        yield


def test_the_first_update_finds_what_it_reads_back_planned(
    tiny_qwen3: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left are the tables of the trainer's tensors: of its digests and of the copy."""
    held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
    planned = []
    with card_engine(tiny_qwen3) as engine:
        for kernel in (copy_regions, digest_regions):
            module = importlib.import_module(f"{kernel.__module__}.gpu")
            plan = module._plan
            monkeypatch.setattr(
                module, "_plan", lambda *of, plan=plan: planned.append(plan) or plan(*of)
            )
        engine.update_weights(held)
    assert len(planned) == 2


def test_a_source_that_changes_while_it_is_read_is_refused(tiny_qwen3: Path, trained: Any) -> None:
    """A digest is taken before the copy, and of the copy: what came between shows."""
    from rollout.weight_sync.transports.inline import InlineSender

    held = {name: x.detach().cuda() for name, x in trained.state_dict().items()}
    announce = InlineSender.in_place

    def late(self: Any, channel: Any, header: Any, regions: Any) -> None:
        held["model.norm.weight"][3] += 1
        announce(self, channel, header, regions)

    with card_engine(tiny_qwen3) as engine, pytest.MonkeyPatch.context() as patch:
        before = greedy_tokens(engine)
        patch.setattr(InlineSender, "in_place", late)
        with pytest.raises(ChecksumMismatch, match=r"model\.norm\.weight"):
            engine.update_weights(held)
        assert greedy_tokens(engine) == before


def test_deterministic_decoding_does_not_depend_on_the_batch(tiny_qwen3: Path) -> None:
    """Bits, so tokens and all three logprobs of each, nor on what the others ask for."""
    drawn = replace(GREEDY, temperature=0.8, seed=5)
    mixed = [drawn, replace(drawn, top_p=0.8), replace(SPECIAL, temperature=1.0, seed=5)]
    with card_engine(tiny_qwen3, deterministic=True) as engine:
        for settings in ([GREEDY] * 3, mixed):
            together = engine.generate(PROMPTS, settings)
            for prompt, asked, among in zip(PROMPTS, settings, together, strict=True):
                [alone] = engine.generate([prompt], asked)
                assert alone.outputs[0].token_ids == among.outputs[0].token_ids
                assert alone.outputs[0].logprobs == among.outputs[0].logprobs

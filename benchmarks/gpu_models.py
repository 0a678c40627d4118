"""Models, engines and processes that the sections of ``gpu.py`` run."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from during_update import LONGEST, Streams
from sync import serving
from torch import Tensor

from rollout import kernels
from rollout.distributed import Rendezvous, RendezvousServer, TensorParallel, join_group
from rollout.engine.sampler_output import SamplerOutput
from rollout.engine.sampling.fused_sampler import make_sampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.worker.graphs.decode_graphs import DecodeGraphs
from rollout.engine.worker.graphs.decode_inputs import DecodeInputs
from rollout.engine.worker.graphs.draw_graphs import CapturePool, capture
from rollout.engine.worker.graphs.prefill_graphs import PrefillGraphs
from rollout.engine.worker.graphs.prefill_inputs import PrefillInputs, prefill_shapes
from rollout.engine.worker.kv_cache import KVCache, KVShape
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.kernels.op import Op
from rollout.models.build import build_model
from rollout.models.config.model import ModelConfig
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model as Instance
from rollout.wire.codec import from_plain, to_plain

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16, BLOCK = torch.bfloat16, 32
T = TypeVar("T")

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def measure(run: Callable[[], object], rounds: int = 10) -> float:
    """Median seconds of a call, after two that warm up; in a dry run, of one call.

    Says so where the host's launches took most of it: then that is what was measured.
    """
    for _ in range(2 if CUDA else 0):
        run()
    times, launches = [], []
    for _ in range(rounds if CUDA else 1):
        began = time.perf_counter()
        if CUDA:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            run()
            stop.record()
            launches.append(time.perf_counter() - began)
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            run()
            times.append(time.perf_counter() - began)
    found = statistics.median(times)
    if CUDA and statistics.median(launches) > 0.9 * found:
        print(f"  the next figure is bound by launches or waits of the host: {found * 1e6:.0f} us")
    return found


def measure_replay(run: Callable[[], object], rounds: int = 10) -> float:
    """As ``measure``, of replays of a graph that holds the call: its kernels and their gaps."""
    if not CUDA:
        return measure(run, rounds)
    graph, _ = capture(run, CapturePool(DEVICE))
    return measure(graph.replay, rounds)


def llama_config(name: str) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **MODELS[name],
    )


@contextmanager
def config_directory(name: str) -> Iterator[Path]:
    """A checkpoint without weights; ``load_format="dummy"`` makes them up."""
    with tempfile.TemporaryDirectory() as folder:
        llama_config(name).save_pretrained(folder)
        yield Path(folder)


@contextmanager
def pinned(implementation: str) -> Iterator[None]:
    """Every op that has it runs this implementation on ``DEVICE``, whatever that is."""
    ops = [op for op in vars(kernels).values() if isinstance(op, Op)]
    before = [dict(op._by_device) for op in ops]
    for op in ops:
        found = op.implementations().get(implementation)
        if found is not None and op.name != "digest":
            op._by_device[DEVICE.type] = found
    try:
        yield
    finally:
        for op, kept in zip(ops, before, strict=True):
            op._by_device = kept


@contextmanager
def launched_in_turn() -> Iterator[None]:
    """No kernel is launched while the one before it runs."""
    from rollout.kernels import gpu_launch

    before = gpu_launch.overlaps
    gpu_launch.overlaps = lambda _: False
    try:
        yield
    finally:
        gpu_launch.overlaps = before


class Model:
    """A Llama with random weights on the device, its KV pages and a sampler."""

    def __init__(self, name: str, dry: bool) -> None:
        self.name = "tiny" if dry else name
        with config_directory(self.name) as folder:
            self.config = ModelConfig.from_directory(str(folder))
        self._stack = ExitStack()
        self.model = self._build(DEVICE)
        for key, parameter in self.model.named_parameters():
            if "norm" in key:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(std=0.02)
        self.total_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.read_bytes = self.total_bytes - self.model.model.embed_tokens.weight.nbytes
        self.kv = KVCache(self._kv_shape(BF16), DEVICE)
        self.kv_bytes = self.kv.shape.block_bytes // BLOCK

    def __enter__(self) -> Self:
        self._stack.enter_context(torch.inference_mode())
        if not CUDA:  # a dry run: the same kernels, in the interpreter
            self._stack.enter_context(pinned("triton"))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self.kv.free()
        del self.model

    def decode(self, batch: int, context: int, draws: bool = True) -> float:
        """Seconds of a step in the wall clock: inputs, replay (dry: a plain forward), sampling.

        ``draws``: the sampler is captured, too.
        """
        inputs = self._decode_batch(batch, context)
        sampler, settings = make_sampler(DEVICE), greedy(batch)
        step: Callable[[], SamplerOutput]
        graphs = None
        if CUDA:
            held = DecodeInputs(batch, inputs.block_tables.shape[1], DEVICE)
            graphs = DecodeGraphs(
                self._forward, [batch], held, CapturePool(DEVICE), DEVICE, draws=draws
            )
            if draws:
                step = lambda: _there(graphs.draw(inputs, settings))  # noqa: E731
            else:
                step = lambda: sampler.sample(_there(graphs.run(inputs)), settings)  # noqa: E731
        else:
            step = lambda: sampler.sample(self._forward(inputs), settings)  # noqa: E731
        seconds = wall(lambda: step().to_host()())
        if graphs is not None:
            graphs.drop()
        return seconds

    def first_token(self, tokens: int) -> tuple[float, float]:
        """Seconds in the wall clock from a prompt on the host to its first token there: by replay
        of the graph of its size (dry: of its inputs alone), and without a graph.
        """
        prompt = self._prompt(tokens, torch.tensor([tokens - 1]))
        shape = min(one for one in prefill_shapes(tokens, 256) if one.tokens >= tokens)
        inputs = PrefillInputs(*shape, prompt.block_tables.shape[1], DEVICE)
        graphs = None
        if CUDA:
            graphs = PrefillGraphs(self._states, [shape], inputs, CapturePool(DEVICE), DEVICE)

        def replayed() -> Tensor:
            if graphs is not None:
                return self.model.logits(_there(graphs.run(prompt)))
            rows = inputs.fill(prompt, shape)
            return self.model.logits(self._states(inputs.batch(shape))[rows])

        sampler, settings = make_sampler(DEVICE), greedy(1)
        plain = lambda: self._forward(_on_device(prompt))  # noqa: E731
        seconds = [
            wall(lambda run=run: sampler.sample(run(), settings).to_host()())
            for run in (replayed, plain)
        ]
        if graphs is not None:
            graphs.drop()
        return seconds[0], seconds[1]

    def prefill(self, tokens: int) -> float:
        batch = _on_device(self._prompt(tokens, torch.tensor([tokens - 1])))
        return measure(lambda: self._forward(batch), rounds=5 if CUDA else 1)

    def exchange(self) -> tuple[int, float]:
        """Bytes of the weights, and seconds of a commit that exchanges them with the shadow."""
        instances = ModelInstances(self.model, self._build, DEVICE, pinned=True)
        instances.open_shadow(partial=True)
        addresses = [p.data_ptr() for p in self.model.parameters()]
        times = []
        for _ in range(4):
            began = time.perf_counter()
            instances.commit()
            times.append(time.perf_counter() - began)
        if addresses != [p.data_ptr() for p in self.model.parameters()]:
            raise AssertionError("a commit moved the weights")
        return self.total_bytes, statistics.median(times[1:])

    def logprob_errors(self, tokens: int) -> tuple[Tensor, Tensor]:
        """How far the likeliest tokens' logprobs are from plain torch in float32, [tokens] each:
        ours, and those of transformers in bfloat16 with the same weights."""
        batch = self._prompt(tokens, torch.arange(tokens))
        ours = self._forward(_on_device(batch)).float().log_softmax(-1)
        wide = build_model(self.config, TensorParallel(), torch.float32, DEVICE, "plain")
        weights = dict(self.model.named_parameters())
        for key, parameter in wide.named_parameters():
            parameter.data.copy_(weights[key].data)
        kv = KVCache(self._kv_shape(torch.float32), DEVICE)
        kv.allocate(-(-tokens // BLOCK))
        with pinned("reference"):
            exact = wide(_on_device(batch), kv.layers).log_softmax(-1)
        ids = batch.input_ids.to(DEVICE)[None]
        theirs = self._in_transformers()(ids).logits[0].float().log_softmax(-1)
        likely = exact.argmax(-1, keepdim=True)
        near, far = ((x - exact).gather(1, likely).abs().flatten() for x in (ours, theirs))
        return near, far

    def _in_transformers(self) -> Any:
        from transformers import LlamaForCausalLM

        with torch.device(DEVICE):
            model = LlamaForCausalLM(llama_config(self.name)).to(BF16).eval()
        found = {}
        for source, slots in self.model.table.slots.items():
            found[source] = torch.empty(slots[0].shape, dtype=BF16, device=DEVICE)
            for slot in slots:
                found[source][slot.take.slices] = self.model.read_slot(slot)
        model.load_state_dict(found)
        return model

    def _build(self, device: torch.device) -> Instance:
        return build_model(self.config, TensorParallel(), BF16, device, "plain")

    def _kv_shape(self, dtype: torch.dtype) -> KVShape:
        config = self.config
        return KVShape(
            num_layers=config.num_layers,
            tensors=2,
            kv_heads=config.num_kv_heads,
            block_size=BLOCK,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    def _forward(self, batch: ForwardBatch) -> Tensor:
        logits: Tensor = self.model(batch, self.kv.layers)
        return logits

    def _states(self, batch: ForwardBatch) -> Tensor:
        return self.model.hidden_states(batch, self.kv.layers)

    def _decode_batch(self, count: int, context: int) -> ForwardBatch:
        pages = -(-context // BLOCK)
        self.kv.allocate(count * pages)
        for layer in self.kv.layers:
            layer.k.normal_()
            layer.v.normal_()
        tables = torch.randperm(count * pages).view(count, pages).int()
        last = torch.full((count,), context - 1)
        return ForwardBatch(
            input_ids=torch.arange(count) % self.config.vocab_size,
            positions=last,
            slot_mapping=tables[:, -1].long() * BLOCK + last % BLOCK,
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.full((count,), context, dtype=torch.int32),
            block_tables=tables,
            logit_rows=torch.arange(count),
        )

    def _prompt(self, tokens: int, rows: Tensor) -> ForwardBatch:
        pages = -(-tokens // BLOCK)
        self.kv.allocate(pages)
        return ForwardBatch(
            input_ids=torch.randint(0, self.config.vocab_size, (tokens,)),
            positions=torch.arange(tokens),
            slot_mapping=torch.arange(tokens),
            query_starts=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([tokens], dtype=torch.int32),
            block_tables=torch.arange(pages, dtype=torch.int32)[None],
            logit_rows=rows,
        )


def greedy(rows: int) -> SamplingMetadata:
    """Settings of rows that take the likeliest token."""
    return SamplingMetadata(
        numbers=np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (rows, 1)),
        top_k=np.zeros(rows, np.int64),
        seeds=np.zeros(rows, np.int64),
        counters=np.zeros(rows, np.int64),
        targets=np.empty(0, np.int64),
        num_top=np.full(rows, -1, np.int64),
    )


def wall(run: Callable[[], object]) -> float:
    """Median seconds of 10 calls after 3, in the wall clock; in a dry run, of one."""
    times = []
    for turn in range(13 if CUDA else 1):
        began = time.perf_counter()
        run()
        if turn > 2 or not CUDA:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _there(found: T | None) -> T:
    if found is None:
        raise AssertionError("a batch was not replayed")
    return found


def _on_device(batch: ForwardBatch) -> ForwardBatch:
    given = {n: getattr(batch, n) for n in ForwardBatch.__slots__}
    return ForwardBatch(**{n: t.to(DEVICE) for n, t in given.items() if t is not None})


def transformers_decode(name: str, batch: int, tokens: int) -> float:
    """Seconds of one of ``tokens`` steps of ``generate``, its prefill taken off."""
    from transformers import LlamaForCausalLM

    with torch.device(DEVICE):
        model = LlamaForCausalLM(llama_config(name)).to(BF16).eval()
    ids = torch.randint(0, MODELS[name]["vocab_size"], (batch, 32), device=DEVICE)
    mask = torch.ones_like(ids)

    def run(count: int) -> float:
        began = time.perf_counter()
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **options
        )
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run(2)
    return (run(tokens) - run(1)) / (tokens - 1)


def made_up(report: Any, kv_cache: int = 4) -> dict[str, Any]:
    """Settings of an engine without weights of its own; ``kv_cache`` in GiB."""
    return {
        "device": DEVICE.type,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "kv_cache_bytes": (1 << 24) if report.dry else kv_cache << 30,
    }


def engine_run(report: Any, name: str) -> None:
    """Generate with the whole engine, then let a second process on the same GPU update it.

    And generate with an engine whose ranks get step N+1 while N runs: the same tokens.
    """
    from rollout import Rollout

    with config_directory(name) as folder:
        settings = made_up(report, 8)
        apart = {**settings, "executor": "multiprocess"}
        with Rollout(str(folder), async_scheduling=False, **apart) as engine:
            in_turn = _generation(report, engine, f"engine {name}")
        with Rollout(str(folder), async_scheduling=True, **apart) as engine:
            if _generation(report, engine, f"engine {name}, steps begun ahead") != in_turn:
                raise AssertionError("steps begun ahead gave other tokens")
        began = time.perf_counter()
        with Rollout(str(folder), **settings) as engine:
            report.add(f"engine {name} start, in one process", time.perf_counter() - began, "s")
            _generation(report, engine, f"engine {name} in one process")
            found = _child("update", {"address": engine.address, "model": name})
            if engine.weight_version != 1 + LATER:
                raise AssertionError(f"version {engine.weight_version} after the updates: {found}")
            report.facts["update transport"] = found["transport"]
            rate = found["num_bytes"] / found["seconds"] / 1e9
            report.add(f"update from another process by {found['transport']}", rate, "GB/s")
            report.add("its commit", found["commit"] * 1e3, "ms")


LATER = 5  # updates after the first, of which the median is told

#: seconds that an update may take once there has been one, digests and vote included
GOALS = {
    ("8b", "inline"): 0.045,
    ("1b", "inline"): 0.015,
    ("8b", "ipc"): 0.050,
    ("1b", "ipc"): 0.020,
    ("8b of float32", "inline"): 0.075,
}


def updates_run(report: Any, name: str) -> None:
    """Full updates of weights on the engine's GPU, from its own process and from another one.

    Each figure stands beside its goal; ``facts`` say how many tensors were read where they lay.
    """
    from transformers import LlamaForCausalLM

    from rollout import Rollout

    with (
        config_directory(name) as folder,
        Rollout(str(folder), **made_up(report)) as engine,
    ):
        with torch.device(DEVICE):
            trained = LlamaForCausalLM(llama_config(name)).to(BF16)
        _report_updates(report, name, "inline", _timed_updates(engine, trained))
        if not report.late():
            wide = trained.float()
            _report_updates(report, f"{name} of float32", "inline", _timed_updates(engine, wide))
            del wide
        del trained
        if CUDA:
            torch.cuda.empty_cache()
        found = _child("update", {"address": engine.address, "model": name})
        _report_updates(report, name, found["transport"], found)


def fleet_run(report: Any, name: str) -> None:
    """Full updates of two engines on one GPU, behind a front, from another process: each maps the
    trainer's memory; beside the same update of one engine, in "updates".
    """
    from rollout import AsyncRollout, Rollout
    from rollout.fleet.coordination.record import Record
    from rollout.fleet.fleet import Fleet
    from rollout.fleet.fronts.backend import FleetBackend

    settings = {**made_up(report), "executor": "auto" if report.dry else "multiprocess"}
    with (
        config_directory(name) as folder,
        tempfile.TemporaryDirectory() as record,
        Rollout(str(folder), **settings) as one,
        Rollout(str(folder), **settings) as other,
    ):
        fleet = Fleet(Record(Path(record), 5.0), lease=5.0)
        for engine in (one, other):
            fleet.add(engine.address)
        with Rollout.over(lambda: AsyncRollout.over(FleetBackend(fleet))) as front:
            fleet.wait_serving(2, 30.0)
            found = _child("update", {"address": front.address, "model": name})
    way = found["details"].get("members_map", {})
    if CUDA and set(way.values()) != {"the trainer's GPU"}:
        raise AssertionError(f"not every member mapped the trainer's GPU: {found['details']}")
    _report_updates(report, f"{name} to two members", found["transport"], found)


def _report_updates(report: Any, name: str, way: str, found: dict[str, Any]) -> None:
    goal = GOALS.get((name, way), 0.0)
    report.add(f"{name} by {way}, the first", found["first"] * 1e3, "ms")
    label = f"the goal of {goal * 1e3:g} ms" if goal else ""
    report.add(f"{name} by {way}, later ones", found["seconds"] * 1e3, "ms", label, goal * 1e3)
    report.add(f"{name} by {way}, the longest of them", found["longest"] * 1e3, "ms")
    report.add(f"{name} by {way}, stall", found["stall"] * 1e3, "ms", "the goal of 1 ms", 1.0)
    for part in ("transfer", "stage", "verify", "commit"):
        report.add(f"{name} by {way}, of it {part}", found["timings"][part] * 1e3, "ms")
    report.facts[f"{name} by {way}"] = found["details"]


def _timed_updates(engine: Any, trained: Any) -> dict[str, Any]:
    """``LATER`` updates after a first one: the median of what they took, and what the last said."""
    took, receipts = [], []
    for _ in range(1 + LATER):
        began = time.perf_counter()
        receipts.append(engine.update_weights(trained))
        took.append(time.perf_counter() - began)
    first, *later = took
    parts = ("transfer", "stage", "verify", "commit", "stall")
    timings = {p: statistics.median(one.timings[p] for one in receipts[1:]) for p in parts}
    return {
        "transport": receipts[-1].transport,
        "num_bytes": receipts[-1].num_bytes,
        "first": first,
        "seconds": statistics.median(later),
        "longest": max(later),
        "commit": timings["commit"],
        "stall": timings["stall"],
        "timings": timings,
        "details": dict(receipts[-1].details),
    }


def streams_run(report: Any, name: str) -> None:
    """Full updates beside 64 streams: how long the streams wait for a token across an update.

    Of an engine in the trainer's process, and of a service on the same GPU; the gaps are told in
    steps, one of which is the median time between two tokens of a stream while nothing is updated.
    """
    from transformers import LlamaForCausalLM

    from rollout import Rollout

    with torch.device(DEVICE):
        trained = LlamaForCausalLM(llama_config(name)).to(BF16)
    settings = made_up(report)
    with config_directory(name) as folder:
        with Rollout(str(folder), **settings) as engine:
            _beside_streams(report, f"{name} inline beside streams", engine, trained)
        if report.late():
            return
        del engine
        gc.collect()
        if CUDA:  # the service needs what the engine had: of 8 B parameters 80 GB hold no more
            torch.cuda.empty_cache()
        with _service(folder, settings) as (_, address), Rollout.connect(address) as engine:
            _beside_streams(report, f"{name} to a service beside streams", engine, trained)


def _beside_streams(report: Any, label: str, engine: Any, trained: Any) -> None:
    count, pause = (2, 0.3) if report.dry else (64, 1.0)
    engine.update_weights(trained)
    with StreamsOfOneCall(engine, count) as streams:
        time.sleep(3 * pause)
        quiet, across, took, stalls = [], [], [], []
        for _ in range(2 if report.dry else LATER):
            start = time.perf_counter()
            time.sleep(pause)
            began = time.perf_counter()
            receipt = engine.update_weights(trained)
            ended = time.perf_counter()
            time.sleep(pause / 4)
            quiet += streams.gaps(start, began)
            across.append(max(streams.gaps(began - pause / 20, ended + pause / 10), default=0.0))
            took.append(ended - began)
            stalls.append(receipt.timings["stall"])
    step = statistics.median(quiet) if quiet else float("nan")
    report.add(f"{label}, an update", statistics.median(took) * 1e3, "ms")
    report.add(f"{label}, stall", statistics.median(stalls) * 1e3, "ms", "the goal of 1 ms", 1.0)
    report.add(f"{label}, a step", step * 1e3, "ms")
    report.add(f"{label}, the longest gap of a quiet second", max(quiet, default=0) / step, "steps")
    longest = statistics.median(across) / step
    report.add(f"{label}, the longest gap", longest, "steps", "the goal of 2", 2.0)


class StreamsOfOneCall(Streams):
    """As many streams of one call: fewer threads of a process in which the engine runs, too."""

    def __init__(self, engine: Any, count: int) -> None:
        super().__init__(engine, count)
        self._threads = [threading.Thread(target=lambda: engine._loop.run(self._together()))]

    async def _together(self) -> None:
        from rollout import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
        prompts = [[i + 1] * 16 for i in range(len(self._arrivals))]
        while not self._over.is_set():
            async with aclosing(self._engine._async.stream_many(prompts, params)) as outputs:
                async for index, _ in outputs:
                    self._arrivals[index].append((time.perf_counter(), 1))
                    if self._over.is_set():
                        break


def _service(folder: Path, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """``rollout serve`` in a process of its own, and its address."""
    command = [sys.executable, "-m", "rollout", "serve", str(folder), "--port=0", "--grpc-port=0"]
    command.append("--exit-with-stdin")
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")]
    return serving(command, **_paths())


def _generation(report: Any, engine: Any, label: str) -> list[list[int]]:
    """Report the rates of whole calls; all their tokens."""
    from rollout import SamplingParams

    batches, tokens = ((1, 2), 4) if report.dry else ((1, 32, 256), 64)
    params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=1)
    drawn = []
    for batch in batches:
        prompts = [[(7 * i + j) % 250 + 1 for j in range(32)] for i in range(batch)]
        engine.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        began = time.perf_counter()
        outputs = engine.generate(prompts, params)
        rate = batch * tokens / (time.perf_counter() - began)
        report.add(f"{label}, {batch} x {tokens} tokens", rate, "tokens/s")
        drawn += [output.outputs[0].token_ids for output in outputs]
    return drawn


def nccl_run(report: Any) -> None:
    """A collective on this project's own raw group, and captured in a graph where there is one."""
    backend, size = ("nccl", torch.cuda.device_count()) if CUDA else ("gloo", 2)
    server = RendezvousServer(size, backend)
    try:
        where = to_plain(server.info)
        others = [_start("rank", {"where": where, "rank": rank}) for rank in range(1, size)]
        rate = collective_rank(where, 0)
        for other in others:
            _finish(other)
    finally:
        server.close()
    report.add(f"broadcast over {backend}, {size} ranks", rate / 1e9, "GB/s")


def collective_rank(where: Any, rank: int) -> float:
    """Bytes a second of a broadcast from rank 0; on a GPU its replay from a graph is checked."""
    device = torch.device("cuda", rank) if CUDA else DEVICE
    if CUDA:
        torch.cuda.set_device(device)
    group = join_group(from_plain(Rendezvous, where), rank, 30.0)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    data = torch.full(((1 << 28) if CUDA else 1 << 12,), rank, dtype=torch.uint8, device=device)

    def run() -> None:
        group.broadcast([data], options).wait()

    seconds = measure(run, rounds=5)
    if int(data.max()) != 0:
        raise AssertionError("a broadcast did not arrive")
    if CUDA:
        tp = TensorParallel(rank, 2, group)  # size above 1: it really calls the group
        part = torch.ones(8, device=device)
        tp.all_reduce(part)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            tp.all_reduce(part)
        graph.replay()
        torch.cuda.synchronize()
    return data.nbytes / seconds


def update_engine(address: str, model: str) -> dict[str, Any]:
    """As ``_timed_updates``, of the engine at ``address`` with weights on this process's GPU."""
    from transformers import LlamaForCausalLM

    from rollout import Rollout

    with torch.device(DEVICE):
        trained = LlamaForCausalLM(llama_config(model)).to(BF16)
    with Rollout.connect(address) as engine:
        return _timed_updates(engine, trained)


def _child(what: str, args: dict[str, Any]) -> dict[str, Any]:
    return _finish(_start(what, args))


def _start(what: str, args: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, what],
        env={**os.environ, **_paths()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(args))  # a secret is among it: not for the command line
    process.stdin.close()
    return process


def _paths() -> dict[str, str]:
    """In the environment of a second process, which imports what this one does."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    process.stdin = None  # closed: ``communicate`` would flush it
    try:
        out, _ = process.communicate(timeout=80)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"a second process ended with {process.returncode}")
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def _main() -> None:
    args = json.loads(sys.stdin.read())
    if sys.argv[1] == "update":
        print(json.dumps(update_engine(**args)))
    else:
        print(json.dumps({"rate": collective_rank(**args)}))


if __name__ == "__main__":
    _main()

"""The sections of ``gpu.py``; each is called with the report and adds its figures to it."""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_models import Model, greedy, launched_in_turn, measure, measure_replay, wall
from torch import Tensor

from rollout import kernels
from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.sampler import Sampler
from rollout.kernels import DigestedAs
from rollout.kernels.region_table import RegionTables
from rollout.weights import PLAIN, Box

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16 = torch.bfloat16


def device(report: Any) -> None:
    """What runs where, and the two rates that all others are held against."""
    import triton

    report.facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name() if CUDA else "CPU, dry run",
    }
    print(report.facts)
    size = (1 << 16) if report.dry else 1 << 30
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    report.copy = 2 * size / measure(lambda: target.copy_(source))
    report.add("copy bandwidth, read and written", report.copy / 1e9, "GB/s")
    n = 64 if report.dry else 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=BF16) for _ in "ab")
    report.matmul = 2 * n**3 / measure(lambda: a @ b)
    report.add("matrix product in bfloat16", report.matmul / 1e12, "TFLOP/s")


def conformance(report: Any) -> None:
    """Every Triton kernel against its reference on the cases of the conformance test."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from kernels.backends import backends  # type: ignore[import-not-found]
    from kernels.cases import all_cases

    checked, worst, failed = 0, 0.0, []
    for case in all_cases():
        for dtype in (BF16, torch.float32):
            if report.late() or (report.dry and checked >= 6):
                break
            op = getattr(kernels, case.op)
            if "triton" not in op.implementations():
                continue
            wanted, mine = case.make(dtype), case.make(dtype)
            a, b = op.reference(*wanted), backends(op)["triton"](*mine)
            results = [(a, b)] if not case.writes or case.returns else []
            results += [(wanted[i], mine[i]) for i in case.writes]
            checked += 1
            limit = 2**-5 if dtype == BF16 else 1e-3 if case.name == "steep" else 1e-4
            error = max((_error(x, y) for x, y in results), default=0.0)
            worst = max(worst, error if dtype == BF16 else 0.0)
            if not error <= limit:
                failed.append(f"{case} {dtype}: {error:.2e}")
    report.add("cases checked", checked, "cases")
    report.add("largest error in bfloat16, relative to 1 + |value|", worst, "")
    if failed:
        raise AssertionError("; ".join(failed))


def _error(a: Any, b: Any) -> float:
    if isinstance(a, tuple):
        return max(_error(x, y) for x, y in zip(a, b, strict=True))
    if not isinstance(a, Tensor):
        return 0.0 if a == b else float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double().cpu(), b.double().cpu()
    return float(((a - b).abs() / (1 + a.abs())).max())


def ops(report: Any) -> None:
    """Each kernel's time against what its bytes or operations cost at the measured rates."""
    dry = report.dry
    hidden, rows, big = (64, 4, 1 << 12) if dry else (4096, 256, 1 << 29)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=BF16)
    weight = torch.ones(hidden, device=DEVICE, dtype=BF16)
    run = _triton
    _moves(report, "add_rms_norm", 4 * x.nbytes, lambda: run("add_rms_norm")(x, x, weight, 1e-5))
    wide = torch.randn(rows, 7 * hidden, device=DEVICE, dtype=BF16)
    _moves(report, "silu_mul", 1.5 * wide.nbytes, lambda: run("silu_mul")(wide))
    a, b = (torch.zeros(big, dtype=torch.uint8, device=DEVICE) for _ in "ab")
    _moves(report, "swap_tensors", 4 * big, lambda: run("swap_tensors")(a, b))
    many = a.view(BF16)
    box = Box.full(tuple(many.shape))
    digested = measure(lambda: run("digest")(many, tuple(many.shape), box))  # the host reads it
    report.add("digest", big / digested / 1e9, "GB/s", "copy", report.copy / 1e9)
    _regions(report, 1 << 12 if dry else 1 << 24)
    logits = torch.randn(rows, 600 if dry else 128256, device=DEVICE, dtype=BF16)
    _moves(report, "scan_logits", logits.nbytes, lambda: run("scan_logits")(logits))
    _draws(report, logits)
    _samplers(report, logits)
    matrix = torch.randn(hidden, hidden, device=DEVICE, dtype=BF16)
    for count in (1,) if dry else (1, 32, 256):
        part = x[:count]
        moved = matrix.nbytes + 2 * part.nbytes
        _moves(report, f"torch linear, {count} rows", moved, lambda p=part: F.linear(p, matrix))
        fixed = lambda p=part: run("batch_invariant_linear")(p, matrix, None, PLAIN, matrix.shape)  # noqa: E731
        _moves(report, f"batch_invariant_linear, {count} rows", moved, fixed)
    for batch, queries, context in _attention_shapes(dry):
        arguments, heads, dim = _attention(batch, queries, context, dry)
        seconds = measure_replay(lambda q=arguments: run("paged_attention")(*q))
        name = f"paged_attention, {batch} x {queries} of {context}"
        if queries == 1:
            moved = 2 * batch * context * arguments[1].shape[1] * dim * 2
            report.add(name, moved / seconds / 1e9, "GB/s", "copy", report.copy / 1e9)
        else:
            work = 4 * batch * heads * dim * queries * (context - queries / 2)
            report.add(name, work / seconds / 1e12, "TFLOP/s", "matmul", report.matmul / 1e12)


def _triton(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(kernels, name).implementation("triton")
    return found


def _moves(report: Any, name: str, nbytes: float, run: Callable[[], object]) -> None:
    rate = nbytes / measure_replay(run, rounds=1 if report.dry else 20)
    report.add(name, rate / 1e9, "GB/s", "copy", report.copy / 1e9)


def _regions(report: Any, numel: int) -> None:
    """Copies and digests of many tensors in one launch each, with the host's part and its wait."""
    sources = [
        torch.randn(numel, device=DEVICE, dtype=BF16) for _ in range(2 if report.dry else 64)
    ]
    targets, tables = [torch.empty_like(x) for x in sources], RegionTables()
    places = [DigestedAs((numel,), Box.full((numel,)), BF16) for _ in sources]
    nbytes, bound = sum(x.nbytes for x in sources), report.copy / 1e9
    copied = measure(lambda: _triton("copy_regions")(targets, sources, tables))
    report.add("copy_regions, read and written", 2 * nbytes / copied / 1e9, "GB/s", "copy", bound)
    digested = measure(lambda: _triton("digest_regions")(sources, places, tables))
    report.add("digest_regions", nbytes / digested / 1e9, "GB/s", "copy", bound)


def _draws(report: Any, logits: Tensor) -> None:
    """A draw without a filter, with top_p, and with both that search for an edge."""
    for count in dict.fromkeys((1, len(logits))):
        for name, top_p, top_k in (("no filter", 1.0, 0), ("top_p", 0.9, 0), ("both", 0.9, 50)):
            rows = logits[:count]
            numbers = torch.tensor([[1.0, top_p, 0.0]] * count, device=DEVICE)
            words = torch.full((count,), -1, device=DEVICE), torch.full((count,), top_k).to(DEVICE)
            chances = torch.full((count,), 0.5, dtype=torch.float64, device=DEVICE)
            seconds = measure_replay(
                lambda a=(rows, words[0], numbers, words[1], chances), f=name != "no filter": (
                    _triton("sample")(*a, filtered=f)
                )
            )
            goal = 60.0 if count == 1 else 250.0
            label = f"the goal of {goal:g} us"
            report.add(f"sample, {count} rows, {name}", seconds * 1e6, "us", label, goal)


def _samplers(report: Any, logits: Tensor) -> None:
    """What a step's rows ask for besides a draw, from the logits to the host's arrays; beside it
    the sampler by torch's operations.
    """
    rows = len(logits)
    plain, every = greedy(rows), np.arange(rows)
    drawn = replace(plain, numbers=np.tile(np.array([1, 0.9, 0, 1, 0, 0], np.float32), (rows, 1)))
    seen = np.arange(500)  # tokens of the one row that has penalties
    penalised = {
        "seen_ids": seen, "seen_counts": np.ones(500, np.float32), "seen_rows": every[:1],
        "seen_starts": np.array([0, 500]),
    }  # fmt: skip
    asked = {
        "greedy": plain,
        "one has penalties": replace(plain, **penalised),
        "5 alternatives": replace(plain, num_top=np.full(rows, 5)),
        "top_p and its masks": replace(drawn, kept_rows=every),
    }
    for name, sampling in asked.items():
        ours, others = (
            wall(lambda s=sampler, x=sampling: s.sample(logits, x).to_host()()) * 1e6
            for sampler in (FusedSampler(), Sampler())
        )
        report.add(f"sampler, {rows} rows, {name}", ours, "us", "by torch's operations", others)


def _attention_shapes(dry: bool) -> Iterator[tuple[int, int, int]]:
    if dry:
        yield from ((2, 1, 40), (1, 8, 8))
    else:
        yield from ((1, 1, 4096), (32, 1, 2048), (256, 1, 1024), (1, 2048, 2048), (1, 512, 8192))


def _attention(
    batch: int, queries: int, context: int, dry: bool
) -> tuple[tuple[Any, ...], int, int]:
    heads, kv_heads, dim, block = (4, 2, 16, 4) if dry else (32, 8, 128, 32)
    pages = -(-context // block)
    tables = torch.randperm(batch * pages, device=DEVICE).view(batch, pages).int()
    shape = (batch * pages, kv_heads, block, dim)
    k, v = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in "kv")
    q = torch.randn(batch * queries, heads, dim, device=DEVICE, dtype=BF16)
    starts = (torch.arange(batch + 1, device=DEVICE) * queries).int()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    return (q, k, v, starts, lengths, tables, dim**-0.5), heads, dim


def rival_attentions(report: Any) -> None:
    """torch's attentions on a prefill of one sequence, its keys and values out of their pages."""
    length = 8 if report.dry else 2048
    arguments, heads, dim = _attention(1, length, length, report.dry)
    q, *pages, starts, _, tables, scale = arguments
    k, v = (x[tables[0].long()].transpose(1, 2).flatten(0, 1)[:length] for x in pages)
    heads_first = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    work, bound = 2 * heads * dim * length**2, report.matmul / 1e12

    def add(name: str, run: Callable[[], object]) -> None:
        report.add(f"{name}, {length}", work / measure(run) / 1e12, "TFLOP/s", "matmul", bound)

    add("torch SDPA", lambda: F.scaled_dot_product_attention(*heads_first, **options))
    if not CUDA:
        return
    from torch.nn.attention.varlen import varlen_attn

    same: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        same["enable_gqa"] = True  # torch 2.11 takes it for granted
    add(
        "torch varlen_attn",
        lambda: varlen_attn(q, k, v, starts, starts, length, length, **same),
    )


def decode(name: str) -> Callable[[Any], None]:
    """Steps through captured graphs, input transfer and greedy sampling included, of decodes and of
    one prompt; and what is not captured.
    """

    def run(report: Any) -> None:
        context = 16 if report.dry else 1024
        with Model(name, report.dry) as model:
            for batch in (2,) if report.dry else (1, 32, 256):
                if report.late():
                    break
                seconds = model.decode(batch, context)
                bound = (model.read_bytes + batch * context * model.kv_bytes) / report.copy
                report.add(f"{name} decode, batch {batch}", seconds * 1e3, "ms/step")
                apart = model.decode(batch, context, draws=False)
                report.add(f"{name} decode, batch {batch}, sampler apart", apart * 1e3, "ms/step")
                with launched_in_turn():
                    turns = model.decode(batch, context)
                report.add(f"{name} decode, batch {batch}, in turn", turns * 1e3, "ms/step")
                rate = 1 / seconds
                report.add(f"{name} decode, batch {batch}", rate, "steps/s", "memory", 1 / bound)
            for tokens in (8,) if report.dry else (128, 512):
                replayed, plain = model.first_token(tokens)
                label = f"{name} first token of 1 x {tokens}, prefill_replayed"
                report.add(label, replayed * 1e3, "ms", "without a graph", plain * 1e3)
            tokens = 8 if report.dry else 2048
            seconds = model.prefill(tokens)
            work = model.read_bytes * tokens / seconds  # 2 operations per 2-byte parameter
            report.add(f"{name} prefill of {tokens}", tokens / seconds, "tokens/s")
            rate = report.matmul / 1e12
            report.add(f"{name} prefill of {tokens}", work / 1e12, "TFLOP/s", "matmul", rate)
            nbytes, seconds = model.exchange()
            rate = 4 * nbytes / seconds / 1e9
            report.add(f"{name} commit by exchange", rate, "GB/s", "copy", report.copy / 1e9)

    return run


def logprobs(report: Any) -> None:
    """Log-probabilities of the bfloat16 model against the same weights in float32.

    How far bfloat16 is off depends on the weights: the limit is what transformers is off by.
    """
    with Model("tiny" if report.dry else "1b", report.dry) as model:
        ours, theirs = model.logprob_errors(8 if report.dry else 256)
    for what, near, far in (
        ("largest", float(ours.max()), float(theirs.max())),
        ("mean", float(ours.mean()), float(theirs.mean())),
    ):
        report.add(f"{what} distance of a logprob from float32", near, "nat")
        report.add(f"{what} distance, transformers in bfloat16", far, "nat")
        if not near <= 1.5 * far + 1e-3:
            raise AssertionError(f"logprobs are {near:.3f} from float32, transformers' {far:.3f}")


def rivals(report: Any) -> None:
    """transformers' generate on the same shapes; the cache is its default."""
    from gpu_models import transformers_decode

    name = "tiny" if report.dry else "1b"
    for batch in (1, 2) if report.dry else (1, 32, 256):
        if report.late():
            break
        seconds = transformers_decode(name, batch, 4 if report.dry else 32)
        report.add(f"transformers {name} decode, batch {batch}", seconds * 1e3, "ms/step")


def engine(report: Any) -> None:
    """The whole engine, steps begun ahead, and an update from a second process on its GPU."""
    from gpu_models import engine_run

    engine_run(report, "tiny" if report.dry else "1b")


def updates(model: str) -> Callable[[Any], None]:
    """Full updates from the engine's own process and from another one, beside their goals."""

    def run(report: Any) -> None:
        from gpu_models import updates_run

        updates_run(report, "tiny" if report.dry else model)

    return run


def streams(model: str) -> Callable[[Any], None]:
    """Full updates beside 64 streams, of an engine in this process and of a service."""

    def run(report: Any) -> None:
        from gpu_models import streams_run

        streams_run(report, "tiny" if report.dry else model)

    return run


def rl(model: str) -> Callable[[Any], None]:
    """Long answers of many streams, preempted, with an update in their middle; scored again."""

    def run(report: Any) -> None:
        from gpu_rl import rl_run

        rl_run(report, "tiny" if report.dry else model)

    return run


def fleet(model: str) -> Callable[[Any], None]:
    """Full updates of a fleet of two engines on one card, which both map the trainer's memory."""

    def run(report: Any) -> None:
        from gpu_models import fleet_run

        fleet_run(report, "tiny" if report.dry else model)

    return run


def nccl(report: Any) -> None:
    """A group of as many ranks as there are cards (one process each), and its broadcast."""
    from gpu_models import nccl_run

    nccl_run(report)


#: name, seconds that it may take, what to call
SECTIONS: tuple[tuple[str, float, Callable[[Any], None]], ...] = (
    ("device", 30, device),
    ("conformance", 100, conformance),
    ("ops", 60, ops),
    ("rival-attention", 20, rival_attentions),
    ("decode-1b", 60, decode("1b")),
    ("decode-8b", 90, decode("8b")),
    ("updates-1b", 60, updates("1b")),
    ("updates-8b", 80, updates("8b")),
    ("streams-8b", 150, streams("8b")),
    ("rl-1b", 120, rl("1b")),
    ("fleet-1b", 60, fleet("1b")),
    ("logprobs", 30, logprobs),
    ("rivals", 60, rivals),
    ("engine", 110, engine),
    ("nccl", 30, nccl),
)

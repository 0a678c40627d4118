"""The sections of ``cards.py``, and the trainer ranks that two of them start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import BF16, CUDA, llama_config, measure

from rollout import Rollout, SamplingParams

CARDS = torch.cuda.device_count() if CUDA else 2
ALL = 1 << (CARDS.bit_length() - 1)  # ranks that the model's heads can be shared out to
HALF = max(1, ALL // 2) if CUDA else ALL  # ranks on each side of an update
LIMIT = 240  # seconds for the trainer's ranks of one section
ASKED = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def cards(report: Any) -> None:
    """What there is, and copies from the first card to each of the others."""
    report.facts = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": _said("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "cuda": torch.version.cuda,
        "ranks": CARDS,
    }
    if not CUDA:
        report.facts["device"] = "CPU, dry run"
        return
    report.facts["cards"] = [torch.cuda.get_device_name(n) for n in range(CARDS)]
    report.facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    report.facts["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    report.facts["topology"] = _said("nvidia-smi", "topo", "-m")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    for n in range(1, CARDS):
        target = torch.empty_like(source, device=f"cuda:{n}")
        rate = source.nbytes / measure(lambda to=target: to.copy_(source))
        peer = "peer access" if torch.cuda.can_device_access_peer(0, n) else "no peer access"
        report.add(f"copy from card 0 to {n}, {peer}", rate / 1e9, "GB/s")


def parallel(report: Any) -> None:
    """Rates of each way to divide the model, tensor parallel, in stages and both, and how far
    logprobs of given tokens are from those of one rank.
    """
    ways = [(1 << n, 1) for n in range(ALL.bit_length())]
    ways += [(each, ALL // each) for each in (1, 2) if each < ALL]
    lines = [[(11 * i + 7 * j) % 250 + 1 for j in range(64)] for i in range(4)]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    batches, tokens = ((2,), 4) if report.dry else ((1, 64), 64)
    first: list[list[float]] | None = None
    with checkpoint(report.dry) as folder:
        for size, stages in ways:
            divided = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
            way = f"TP {size}" + (f" x PP {stages}" if stages > 1 else "")
            with Rollout(folder, **divided, **_settings(report.dry)) as engine:
                for batch in batches:
                    prompts = [lines[i % 4][:32] for i in range(batch)]
                    asked = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
                    engine.generate(prompts, ASKED)
                    began = time.perf_counter()
                    engine.generate(prompts, asked)
                    rate = batch * tokens / (time.perf_counter() - began)
                    report.add(f"{way}, {batch} x {tokens} tokens", rate, "tokens/s")
                found = [
                    [
                        at[token]
                        for at, token in zip(output.prompt_logprobs[1:], line[1:], strict=True)
                    ]
                    for output, line in zip(engine.generate(lines, scored), lines, strict=True)
                ]
            first = first or found
            apart = max(
                abs(a - b)
                for ours, other in zip(found, first, strict=True)
                for a, b in zip(ours, other, strict=True)
            )
            report.add(f"{way}, logprobs furthest from one rank's", apart, "nats")


def updates(report: Any) -> None:
    """From FSDP2 on one half of the cards into an engine on the other."""
    transports = ["auto", "broadcast", "reshard", "p2p"]
    if CUDA and CARDS < 2:  # NCCL refuses two ranks on one card
        transports = ["auto"]
        report.facts["left out"] = "broadcast, reshard and p2p, which need two cards"
    elif not CUDA:
        transports.remove("reshard")
    with (
        checkpoint(report.dry) as folder,
        Rollout(folder, tensor_parallel_size=HALF, **_settings(report.dry)) as engine,
    ):
        found = trainers(
            "send", HALF, folder, address=engine.address, transports=transports, dry=report.dry
        )
        if engine.weight_version != 2 * len(transports):
            raise AssertionError(f"version {engine.weight_version} after {found}")
    for asked, told in found.items():
        label = f"FSDP {HALF} to TP {HALF} by {told['transport']}"
        label += f" ({asked})" if asked != told["transport"] else ""
        report.add(f"{label}, the second", told["seconds"] * 1e3, "ms")
        report.add(f"{label}, stall", told["stall"] * 1e3, "ms")
        report.facts[label] = told["details"]


def colocated(report: Any) -> None:
    """An engine in the ranks of an FSDP2 trainer, on all cards: shards to shards."""
    with checkpoint(report.dry) as folder:
        told = trainers("share", ALL, folder, dry=report.dry)
    label = f"FSDP {ALL} and TP {ALL} in the same processes"
    report.add(f"{label}, an update", told["seconds"] * 1e3, "ms")
    report.add(f"{label}, sleep and wake_up", told["slept"] * 1e3, "ms")
    report.facts[label] = told["details"]


#: name, seconds that it may take, what to call
SECTIONS: tuple[tuple[str, float, Callable[[Any], None]], ...] = (
    ("cards", 30, cards),
    ("parallel", 180, parallel),
    ("updates", 160, updates),
    ("colocated", 160, colocated),
)


# ---- what they share ----


@contextmanager
def checkpoint(dry: bool) -> Iterator[str]:
    """A directory with a model of random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = llama_config("tiny" if dry else "1b")
    config.num_hidden_layers = max(2, config.num_hidden_layers)  # of stages
    model = LlamaForCausalLM(config).to(BF16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield folder


def _settings(dry: bool) -> dict[str, Any]:
    return {
        "device": "cuda" if CUDA else "cpu",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "kv_cache_bytes": (1 << 24) if dry else 4 << 30,
        "num_threads": 1 if dry else None,
    }


def trainers(role: str, size: int, folder: str, **args: Any) -> dict[str, Any]:
    """What rank 0 of ``size`` ranks of a trainer in ``role`` says; all have ended then."""
    with tempfile.TemporaryDirectory() as where:
        said = {"role": role, "size": size, "folder": folder, "store": f"{where}/store", **args}
        logs = [Path(where, f"{rank}.log") for rank in range(size)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        ranks = []
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, json.dumps({**said, "rank": rank})]
            with log.open("w") as errors:
                ranks.append(
                    subprocess.Popen(
                        command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
                    )
                )
        try:
            ends = time.monotonic() + LIMIT
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < ends:
                if any(rank.returncode for rank in ranks):
                    time.sleep(2)  # for what the others have to say of it
                    break
                time.sleep(0.1)
        finally:
            codes = [rank.poll() for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes) or None in codes:
            # One that ended by itself says more than those that waited for it.
            wrong = max(range(size), key=lambda rank: abs(codes[rank] or 0))
            raise RuntimeError(
                f"the trainer's ranks ended with {codes}; rank {wrong}: ...\n"
                + logs[wrong].read_text()[-1500:]
            )
        assert ranks[0].stdout is not None
        found: dict[str, Any] = json.loads(ranks[0].stdout.read().splitlines()[-1])
    return found


def _said(*command: str) -> str:
    """What a program printed; why not, where it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()


# ---- a trainer's rank ----


def _rank(role: str, rank: int, size: int, folder: str, store: str, dry: bool, **args: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    card = rank if role == "share" else CARDS - 1 - rank  # apart from the engine's, the first
    if CUDA:
        torch.cuda.set_device(card)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if CUDA else "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    model = model.cuda() if CUDA else model
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = _send(model, **args) if role == "send" else _share(model, folder, dry)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def _send(model: Any, address: str, transports: list[str]) -> dict[str, Any]:
    found = {}
    with Rollout.connect(address) as engine:
        for transport in transports:
            for _ in "12":
                began = time.perf_counter()
                receipt = engine.update_weights(model, transport=transport)
                seconds = time.perf_counter() - began
            found[transport] = {
                "transport": receipt.transport,
                "seconds": seconds,
                "stall": receipt.timings["stall"],
                "details": dict(receipt.details),
            }
    return found


def _share(model: Any, folder: str, dry: bool) -> dict[str, Any]:
    with Rollout.from_ranks(folder, **_settings(dry)) as engine:
        before = engine.generate([[5, 6, 7]], ASKED)[0].outputs[0].token_ids
        began = time.perf_counter()
        engine.sleep()
        engine.wake_up()
        slept = time.perf_counter() - began
        for _ in "12":
            began = time.perf_counter()
            receipt = engine.update_weights(model)
            seconds = time.perf_counter() - began
        after = engine.generate([[5, 6, 7]], ASKED)[0].outputs[0].token_ids
    if before != after:
        raise AssertionError("the checkpoint's own weights gave other tokens than it")
    return {"seconds": seconds, "slept": slept, "details": dict(receipt.details)}


if __name__ == "__main__":
    _rank(**json.loads(sys.argv[1]))

"""Updates, faults and streams together for a while; afterwards everything must have been true.

    python benchmarks/soak.py [MODEL] [--seconds 600] [--seed 0] [--clients 16] [--every 1.0]

MODEL is a tiny checkpoint (default: one made up here). Runs an engine of TP=2 (processes) and one
of TP=1, streaming clients on both (half of them over gRPC), and on each an update every second over
a random transport, encoding, staging and in-flight mode, some with a fault; rollbacks, sleeps, and
now and then a rank that is killed, after which its engine is started anew. After each of them: the
version, the state and the digests of the live weights are those of what the trainer sent last; each
token of the sampled completions has the logprob that the weights of its version give it (see
rescore.py). At the end threads, files, shared memory and memory are flat. Prints one JSON object;
status 1 if anything was violated. What happens to one engine is in soak_member.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

# PyTorch's store asks the resolver for a peer's name when a wait for it has failed; one that does
# not answer costs 20 s, longer than what is checked here. As in tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import psutil
import torch
from safetensors.torch import load_file
from soak_member import TIMEOUT, Member
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import Rollout
from rollout.testing.faults import Fault, Faulty

GROWTH = 48 << 20  # bytes that a process may grow from warm to the end


class Soak:
    """What both engines share: the seed, the counts, and what was found wrong."""

    def __init__(self, path: str, seed: int, seconds: float) -> None:
        self.path, self.seed, self.seconds = path, seed, seconds
        self.base = load_file(Path(path) / "model.safetensors")
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.transports: Counter[str] = Counter()
        self.violations: list[str] = []
        self._lock = threading.Lock()

    def count(self, **numbers: int) -> None:
        with self._lock:
            self.counts.update(numbers)

    def fault(self, what: str) -> None:
        with self._lock:
            self.faults[what] += 1

    def violated(self, what: str) -> None:
        with self._lock:
            self.violations.append(what)
        print(f"VIOLATION {what}", file=sys.stderr, flush=True)

    def weights(self, which: int) -> dict[str, torch.Tensor]:
        """Set ``which``: the base with other values for a twentieth of its elements."""
        if which == 0:
            return self.base
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + which)
        made = {}
        for name, tensor in self.base.items():
            changed = torch.rand(tensor.shape, generator=generator) < 0.05
            made[name] = torch.where(changed, tensor + 0.1, tensor)
        return made


COUNTED = (
    "updates", "in_place", "failed", "mended", "rollbacks", "sleeps", "restarts", "refused",
    "checks",
)  # fmt: skip


def resources(members: list[Member]) -> dict[str, int]:
    """Of this process and of the engines' ranks; shared-memory files of the host.

    Other children are trainers that are about to die. That they are gone is checked at the end.
    """
    me = psutil.Process()
    ranks = [psutil.Process(pid) for member in members for pid in member.life.ranks]
    return {
        "threads": me.num_threads(),
        "files": me.num_fds() + sum(rank.num_fds() for rank in ranks),
        "memory": me.memory_info().rss,
        "ranks_memory": sum(rank.memory_info().rss for rank in ranks),
        "shared": len(list(Path("/dev/shm").glob(f"rollout-ipc-{me.pid}-*"))),
    }


def floor(members: list[Member], seconds: float) -> dict[str, int]:
    """The least of each resource within a while in which every engine is up: what is held, without
    what updates under way and groups that are being let go of hold for a moment."""
    end, least = time.monotonic() + seconds, {}
    while time.monotonic() < end or not least:
        time.sleep(0.2)
        try:
            now = resources(members)
        except psutil.NoSuchProcess:  # a rank has just been killed
            continue
        if any(member.down.is_set() for member in members):
            continue
        least = {what: min(count, least.get(what, count)) for what, count in now.items()}
    return least


def compare(soak: Soak, warm: dict[str, int], end: dict[str, int]) -> None:
    for what, most in (("threads", 6), ("files", 12), ("memory", GROWTH), ("shared", 0),
                       ("ranks_memory", GROWTH)):  # fmt: skip
        if end[what] > warm[what] + most:
            soak.violated(f"{what} grew from {warm[what]} to {end[what]}")


def run(path: str, seconds: float, seed: int, clients: int, every: float) -> int:
    soak = Soak(path, seed, seconds)
    started = time.monotonic()
    members = [Member(soak, tp, clients // 2, every) for tp in (2, 1)]
    try:
        for member in members:
            for thread in member.threads:
                thread.start()
        window = min(10.0, seconds / 5)
        time.sleep(seconds / 2 - window)
        warm = floor(members, window)
        time.sleep(seconds / 2 - window)
        end = floor(members, window)
        soak.over.set()
        for member in members:
            member.end()
    finally:
        soak.over.set()
        for member in members:
            member.close()
    compare(soak, warm, end)
    if left := psutil.Process().children(recursive=True):
        soak.violated(f"processes are left: {left}")
    scores = [score for member in members for score in member.scores]
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started, 1), "seed": seed,
                **{k: soak.counts[k] for k in COUNTED},
                "by_transport": dict(soak.transports), "faults": sum(soak.faults.values()),
                "faults_by_kind": dict(soak.faults),
                "completions": soak.counts["completions"], "tokens": soak.counts["tokens"],
                "tokens_checked": sum(s.checked for s in scores),
                "tokens_checked_of_mixed_kv": sum(s.mixed for s in scores),
                "tokens_not_checkable": soak.counts["slept_through"]
                + sum(s.unknown for s in scores),
                "worst_logprob_difference": max(s.worst for s in scores),
                "warm": warm, "end": end, "violations": len(soak.violations),
            }
        ),
        flush=True,
    )  # fmt: skip
    return 1 if soak.violations else 0


def die(path: str, address: str, transport: str) -> int:
    """A trainer that is killed while it sends."""
    weights = load_file(Path(path) / "model.safetensors")
    with Rollout.connect(address) as engine:
        engine.update_weights(
            weights, transport=Faulty(transport, Fault("kill", bucket=3)), bucket_bytes=8 << 10,
            timeout=TIMEOUT,
        )  # fmt: skip
    return 0


def make_tiny(path: str, seed: int) -> None:
    """A model of two layers whose weights spread its logits."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--die", nargs=2, metavar=("ADDRESS", "TRANSPORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.die:
        return die(args.model, *args.die)
    if args.model is not None:
        return run(args.model, args.seconds, args.seed, args.clients, args.every)
    with tempfile.TemporaryDirectory() as path:
        make_tiny(path, args.seed)
        return run(path, args.seconds, args.seed, args.clients, args.every)


if __name__ == "__main__":
    sys.exit(main())

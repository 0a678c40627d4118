"""Updates, faults and streams together for a while; afterwards everything must have been true.

    python benchmarks/soak.py [MODEL] [--seconds 600] [--seed 0] [--clients 16] [--every 1.0]

MODEL is a tiny checkpoint (default: one made up here). Runs an engine of TP=2 (processes) and one
of TP=1, streaming clients on both (half of them over gRPC), and on each an update every second over
a random road, encoding and in-flight mode, some with a fault. After each update: the version, the
state and the digests of the live weights are those of what the trainer sent last; each token of the
sampled completions has the logprob that the weights of its version give it (see rescore.py). At the
end threads, files, shared memory and memory are flat. Prints one JSON object; status 1 if anything
was violated.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from rescore import Rescorer
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import Rollout, RolloutError, SamplingParams
from rollout.errors import DeadlineExceeded
from rollout.kernels import digest
from rollout.weight_sync.faults import Fault, Faulty
from rollout.weights import Box

TIMEOUT = 4.0  # of every update
LIMIT = 4 * TIMEOUT + 4  # seconds after which an update, with whatever fault, has ended
GAP = 15.0  # seconds without a token that a client accepts
ROADS = ("auto", "inline", "broadcast", "ipc")
MOST_WAITING = 200  # completions kept to be scored
GROWTH = 48 << 20  # bytes that a process may grow from warm to the end

Weights = dict[str, torch.Tensor]


class Soak:
    """What both engines share: the seed, the counts, and what was found wrong."""

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.seed = path, seed
        self.base = load_file(Path(path) / "model.safetensors")
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []
        self._lock = threading.Lock()

    def count(self, **numbers: int) -> None:
        with self._lock:
            self.counts.update(numbers)

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


class Member:
    """One engine: its updates, its clients, and what each of its versions is made of."""

    def __init__(self, soak: Soak, tp: int, clients: int, every: float) -> None:
        self.soak, self.name, self.every = soak, f"tp{tp}", every
        before = set(psutil.Process().children())
        self.engine = Rollout(
            soak.path, tensor_parallel_size=tp, device="cpu", dtype="float32", num_threads=1,
            num_kv_blocks=512, max_model_len=512, timeout=20.0,
        )  # fmt: skip
        self.ranks = sorted(p.pid for p in set(psutil.Process().children()) - before)
        self.remote = Rollout.connect(self.engine.address, timeout=20.0)
        self.random = random.Random(f"{soak.seed}/{tp}")
        self.names = [meta.name for meta in self.engine.weight_info().tensors]
        self.content = {0: dict.fromkeys(self.names, 0)}  # by version: which set each tensor is of
        self.version, self.next_set = 0, 1
        self.done: queue.Queue = queue.Queue(MOST_WAITING)
        self.rescorer = Rescorer(soak.path, self.weights_of)
        self.threads = [
            threading.Thread(target=self._clients_loop, args=(i,)) for i in range(clients)
        ]
        self.threads += [threading.Thread(target=loop) for loop in (self._updates, self._scoring)]

    def weights_of(self, version: int) -> Weights:
        content = self.content[version]
        sets = {which: self.soak.weights(which) for which in set(content.values())}
        return {name: sets[which][name] for name, which in content.items()}

    # ---- updates ----

    def _updates(self) -> None:
        due = time.monotonic()
        while not self.soak.over.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.every, time.monotonic())
            try:
                self._event()
                self._verify()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                self.soak.violated(f"{self.name}: {type(error).__name__}: {error}")

    def _event(self) -> None:
        if self.random.random() < 0.06:
            self._roll_back()
        else:
            self._update()

    def _roll_back(self) -> None:
        try:
            receipt = self.engine.rollback(TIMEOUT)
        except RolloutError:
            return  # there was nothing to go back to; checked below like every failure
        if (self.version - 1) not in self.content:
            self.soak.violated(f"{self.name}: rolled back beyond the first version")
        self._committed(receipt, self.content[self.version - 1], self.names)
        self.soak.count(rollbacks=1)

    def _update(self) -> None:
        draw = self.random
        which, self.next_set = self.next_set, self.next_set + 1
        partial = draw.random() < 0.15
        names = [n for n in self.names if "layers.1" in n] if partial else self.names
        weights = self.soak.weights(which)
        road, fault = draw.choice(ROADS), self._fault()
        if fault is not None and road == "auto":
            road = "inline"
        options = {
            "transport": road if fault is None else Faulty(road, fault),
            "encoding": draw.choice(("full", "delta")), "partial": partial, "timeout": TIMEOUT,
            "in_flight": draw.choice(("keep", "keep", "keep", "recompute", "abort", "wait")),
            "bucket_bytes": draw.choice((8, 16, 64)) << 10, "label": f"set {which}",
        }  # fmt: skip
        handle = draw.choice((self.engine, self.remote))
        if fault is not None:
            self.soak.faults[f"{fault.kind} {fault.phase}"] += 1
        started = time.monotonic()
        try:
            receipt = handle.update_weights({n: weights[n] for n in names}, **options)
        except RolloutError as error:
            self.soak.count(failed=1)
            busy = options["in_flight"] == "wait" and isinstance(error, DeadlineExceeded)
            if fault is None and not busy:  # long requests may outlast the deadline of "wait"
                raise AssertionError(f"a good update failed: {error!r}") from error
            return
        finally:
            if (took := time.monotonic() - started) > LIMIT:
                self.soak.violated(f"{self.name}: {fault} on {road} took {took:.1f} s")
        self.soak.count(updates=1)
        content = {**self.content[self.version], **dict.fromkeys(names, which)}
        self._committed(receipt, content, names)

    def _fault(self) -> Fault | None:
        draw = self.random
        if draw.random() > 0.3:
            return None
        if draw.random() < 0.3:
            kind = draw.choice(("delay", "cut", "stall", "kill"))
            phase = draw.choice(("connect", "bucket", "seal"))
        else:
            kind = draw.choice(
                ("flip", "drop", "duplicate", "reorder", "truncate", "dtype", "shape")
            )
            phase = "bucket"
        pid = None
        if kind == "kill":  # a whole trainer process; it dies as it sends
            self._killed_trainer()
            return None
        if kind == "stall" and self.ranks and draw.random() < 0.7:
            pid = draw.choice(self.ranks)
        return Fault(
            kind, phase, bucket=draw.randrange(6), bit=draw.randrange(1 << 20), seconds=0.3, pid=pid
        )

    def _killed_trainer(self) -> None:
        self.soak.faults["kill trainer"] += 1
        road = self.random.choice(ROADS[1:])
        command = [sys.executable, __file__, self.soak.path, "--die", self.engine.address, road]
        done = subprocess.run(command, timeout=60, check=False, capture_output=True)
        if done.returncode != -9:
            self.soak.violated(f"the trainer that was to die: {done.stderr[-500:]!r}")
        self.soak.count(failed=1)

    def _committed(self, receipt, content: dict[str, int], names: list[str]) -> None:
        self.version += 1
        if receipt.version != self.version:
            self.soak.violated(
                f"{self.name}: v{receipt.version} came where v{self.version} was due"
            )
        self.content[self.version] = content
        mine = self.weights_of(self.version)
        wanted = sum(digest(t, tuple(t.shape), Box.full(tuple(t.shape)))
                     for n, t in mine.items() if n in set(names)) % 2**64  # fmt: skip
        if receipt.digest != wanted:
            self.soak.violated(f"{self.name}: the receipt of v{self.version} has another digest")

    def _verify(self) -> None:
        """The engine is where the trainer's books say that it is."""
        deadline = time.monotonic() + TIMEOUT
        while (info := self.engine.weight_info()).state != "idle" and time.monotonic() < deadline:
            time.sleep(0.02)
        if (info.state, info.version) != ("idle", self.version):
            self.soak.violated(f"{self.name}: {info.state} at v{info.version}, not v{self.version}")
        report = self.engine.check_weights(self.weights_of(self.version), timeout=TIMEOUT)
        if not report.equal:
            self.soak.violated(f"{self.name}: v{self.version} differs: {report.differing[:3]}")
        self.soak.count(checks=1)

    # ---- generation ----

    def _clients_loop(self, number: int) -> None:
        draw = random.Random(f"{self.soak.seed}/{self.name}/{number}")
        engine = (self.engine, self.remote)[number % 2]
        shared = list(range(40, 80))  # a prefix that the cache would like
        while not self.soak.over.is_set():
            prompt = [*shared[: draw.choice((0, 20, 40))], *draw.choices(range(3, 300), k=6)]
            params = SamplingParams(
                seed=draw.randrange(1 << 30), max_tokens=draw.choice((8, 40, 160)), ignore_eos=True
            )
            last, arrived = None, time.monotonic()
            try:
                for output in engine.stream(prompt, params):
                    now = time.monotonic()
                    if now - arrived > GAP:
                        self.soak.violated(f"{self.name}: {now - arrived:.1f} s without a token")
                    last, arrived = output, now
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                self.soak.violated(f"{self.name}: client: {type(error).__name__}: {error}")
                return
            self.soak.count(tokens=len(last.outputs[0].token_ids), completions=1)
            if not self.done.full():
                self.done.put((prompt, last.outputs[0]))

    def _scoring(self) -> None:
        while not (self.soak.over.is_set() and self.done.empty()):
            try:
                prompt, completion = self.done.get(timeout=0.2)
            except queue.Empty:
                continue
            newest = max((s.version for s in completion.kv_spans), default=0)
            deadline = time.monotonic() + LIMIT  # tokens may outrun the trainer's own books
            while newest not in self.content and time.monotonic() < deadline:
                time.sleep(0.01)
            try:
                self.rescorer.check(prompt, completion)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                self.soak.violated(f"{self.name}: scoring: {type(error).__name__}: {error}")

    def end(self) -> None:
        for thread in self.threads:
            thread.join(90)
            if thread.is_alive():
                self.soak.violated(f"{self.name}: a thread does not end")
        for wrong in self.rescorer.scores.wrong[:5]:
            self.soak.violated(f"{self.name}: {wrong}")
        if self.engine.metrics().preemptions_total:
            self.soak.violated(f"{self.name}: preempted, which hides the context of tokens")


def resources() -> dict[str, int]:
    """Of this process, and the memory of its children; shared-memory files of the host."""
    me = psutil.Process()
    children = me.children(recursive=True)
    return {
        "threads": me.num_threads(),
        "files": me.num_fds() + sum(child.num_fds() for child in children),
        "memory": me.memory_info().rss,
        "children_memory": sum(child.memory_info().rss for child in children),
        "shared": len(list(Path("/dev/shm").glob(f"rollout-ipc-{me.pid}-*"))),
    }


def floor(seconds: float) -> dict[str, int]:
    """The least of each resource within a while: what is held, without what updates under way
    and groups that are being let go of hold for a moment."""
    end = time.monotonic() + seconds
    least = resources()
    while time.monotonic() < end:
        time.sleep(0.2)
        least = {what: min(count, least[what]) for what, count in resources().items()}
    return least


def compare(soak: Soak, warm: dict[str, int], end: dict[str, int]) -> None:
    for what, most in (("threads", 6), ("files", 12), ("memory", GROWTH), ("shared", 0),
                       ("children_memory", GROWTH)):  # fmt: skip
        if end[what] > warm[what] + most:
            soak.violated(f"{what} grew from {warm[what]} to {end[what]}")


def run(path: str, seconds: float, seed: int, clients: int, every: float) -> int:
    soak = Soak(path, seed)
    started = time.monotonic()
    members = [Member(soak, tp, clients // 2, every) for tp in (2, 1)]
    try:
        for member in members:
            for thread in member.threads:
                thread.start()
        window = min(10.0, seconds / 5)
        time.sleep(seconds / 2 - window)
        warm = floor(window)
        time.sleep(seconds / 2 - window)
        end = floor(window)
        soak.over.set()
        for member in members:
            member.end()
    finally:
        soak.over.set()
        for member in members:
            member.remote.shutdown()
            member.engine.shutdown()
    compare(soak, warm, end)
    if left := psutil.Process().children(recursive=True):
        soak.violated(f"processes are left: {left}")
    scores = [member.rescorer.scores for member in members]
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started, 1), "seed": seed,
                **{k: soak.counts[k] for k in ("updates", "failed", "rollbacks", "checks")},
                "faults": sum(soak.faults.values()), "faults_by_kind": dict(soak.faults),
                "completions": soak.counts["completions"], "tokens": soak.counts["tokens"],
                "tokens_checked": sum(s.checked for s in scores),
                "tokens_checked_of_mixed_kv": sum(s.mixed for s in scores),
                "tokens_not_checkable": sum(s.unknown for s in scores),
                "worst_logprob_difference": max(s.worst for s in scores),
                "warm": warm, "end": end, "violations": len(soak.violations),
            }
        ),
        flush=True,
    )  # fmt: skip
    return 1 if soak.violations else 0


def die(path: str, address: str, road: str) -> int:
    """A trainer that is killed while it sends."""
    weights = load_file(Path(path) / "model.safetensors")
    with Rollout.connect(address) as engine:
        engine.update_weights(
            weights, transport=Faulty(road, Fault("kill", bucket=3)), bucket_bytes=8 << 10,
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
    parser.add_argument("--die", nargs=2, metavar=("ADDRESS", "ROAD"), help=argparse.SUPPRESS)
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

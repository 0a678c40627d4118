"""A fleet of processes under faults of processes; afterwards everything must have been true.

    python benchmarks/soak_fleet.py [--seconds 600] [--seed 0] [--members 3] [--clients 4]

Runs a front and its engines, each a process of its own and reached through a proxy, with a record
on a small disk of its own, clients at the front, half of whose calls are streamed, and one who
asks each engine at its own address. Round after round a fault or two (process_faults.py) befall
them, of random length, at a random phase: at rest, while a trainer's update is staged, when an
engine is prepared, when the decision is written, when an engine has committed. Then: the update has
ended within its deadline; all serve again; what was acknowledged is live, or what an update brought
whose answer was lost, and in the fleet's epoch; the weights of front and engines are those; an
update goes through. Each token has the logprob that the weights of its version give it
(rescore.py); none is of a version below what was acknowledged when it was asked for. A client's
call fails only where the front does.
Prints one JSON object; status 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as in soak.py

import torch
from process_faults import Disk, Fault, Place, eventually, of_front, of_member
from rescore import Rescorer
from safetensors.torch import load_file
from soak import make_tiny

from rollout import Rollout, RolloutError, SamplingParams
from rollout.errors import EngineRestarted
from rollout.rpc.client import RolloutClient

LEASE = 3.0  # seconds: half of it is a pause that a busy machine may make
TIMEOUT = 5.0  # of every wait of an update
LIMIT = 90.0  # seconds after which all that was begun has ended, on a busy machine
LONGEST = 3 * LEASE  # of a fault
PHASES = ("at rest", "staging", "prepared", "written", "committed")
ENGINE = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--num-kv-blocks", "128",
          "--max-model-len", "512", "--shutdown-timeout", "5")  # fmt: skip


class FleetSoak:
    """One course: what was done, what came of it, and the ``violations``."""

    def __init__(self, folder: Path, seed: int, members: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        self.model = str(folder / "model")
        make_tiny(self.model, seed)
        self.base = load_file(Path(self.model) / "model.safetensors")
        self.disk = Disk(folder)
        self.members = [
            Place(f"m{n}", folder, ["serve", self.model, *ENGINE]) for n in range(members)
        ]
        words = ["fleet", "--record", str(self.disk.folder / "record"), "--lease", str(LEASE)]
        words += ["--start-timeout", str(LIMIT)]
        words += [w for m in self.members for w in ("--engine", m.proxy.address)]
        self.front = Place("front", folder, words)
        self.over, self.front_fails = threading.Event(), threading.Event()
        self.outages = 0  # of the front
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()
        self.violations: list[str] = []
        self.acknowledged = 0
        self.sent = {0: 0}  # the set of weights that each version is
        self.tried: list[int] = []  # sets that were sent since, of which one may be live
        self.next_set = 1
        self.done: queue.Queue = queue.Queue()
        self.rescorer = Rescorer(self.model, lambda version: self.weights(self.sent[version]))

    def violated(self, what: str) -> None:
        self.violations.append(what)
        print(f"VIOLATION {what}", file=sys.stderr, flush=True)

    def weights(self, which: int) -> dict[str, torch.Tensor]:
        """Set ``which``: the base (0), or it with other values for a twentieth of its elements."""
        if which == 0:
            return self.base
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + which)
        return {
            name: torch.where(torch.rand(t.shape, generator=generator) < 0.05, t + 0.1, t)
            for name, t in self.base.items()
        }

    # ---- a course ----

    def run(self, seconds: float, clients: int) -> None:
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_ready()
        self.front.start()
        self.front.wait_ready()
        self.client = Rollout.connect(self.front.address, timeout=20.0)
        self.epoch = self.client.weight_info().epoch
        self.update("at rest", [])
        threads = [threading.Thread(target=self.sample, args=(n,)) for n in range(clients)]
        threads += [threading.Thread(target=self.ask, args=(m,)) for m in self.members]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.violations:
            self.round()
        self.over.set()
        for thread in threads:
            thread.join(LIMIT)
            if thread.is_alive():
                self.violated("a client's call does not end")
        self.score()
        self.client.shutdown()

    def round(self) -> None:
        phase, faults = self.random.choice(PHASES), self.faults()
        what = f"{' and '.join(fault.kind for fault in faults)}, {phase}"
        print(f"{self.counts['rounds']}: {what}", file=sys.stderr, flush=True)
        self.counts["rounds"] += 1
        before = len(self.violations)
        for fault in faults:
            self.kinds[fault.kind] += 1
        if any(fault.of_front for fault in faults):
            self.outages += 1
            self.front_fails.set()
        self.update(phase, faults)
        self.recover()
        self.front_fails.clear()
        self.find_out()
        if not eventually(self.goes_through, LIMIT):
            self.violated("no update goes through after all was over")
        self.recover()  # one that was late for it catches up
        self.check()
        self.score()
        if len(self.violations) > before:
            print(f"in round {self.counts['rounds'] - 1}: {what}", file=sys.stderr, flush=True)

    def faults(self) -> list[Fault]:
        """One, or two of different places, of which one at most loses a member's weights: with a
        quorum of 2 what is live may be on no more than two.
        """
        everywhere = [of_front(self.front, self.disk), *map(of_member, self.members)]
        count = self.random.choice((1, 1, 2))
        while True:
            faults = [self.random.choice(of) for of in self.random.sample(everywhere, count)]
            if sum(fault.loses for fault in faults) < 2:
                return faults

    # ---- an update with faults ----

    def update(self, phase: str, faults: list[Fault]) -> Exception | None:
        """Its error, if it failed; the faults are over when it returns."""
        which, self.next_set = self.next_set, self.next_set + 1
        version = self.client.weight_info().version + 1
        self.tried.append(which)
        weights = self.weights(which)
        self.record = (self.disk.folder / "record" / "fleet.sqlite").stat().st_mtime_ns
        over = threading.Event()

        def befall() -> None:
            seconds = self.random.uniform(0.1, LONGEST)
            for fault in faults:
                fault.begin()
            time.sleep(seconds)
            for fault in faults:
                fault.end()

        def watch() -> None:
            if faults and phase != "staging":
                reached = self.wait_phase(phase, version, over)
                self.hit[phase if reached else "after"] += 1
                befall()

        def source():
            for number, item in enumerate(weights.items()):
                if number == 3 and phase == "staging" and faults:
                    self.hit[phase] += 1
                    staging.start()
                yield item

        watcher, staging = threading.Thread(target=watch), threading.Thread(target=befall)
        watcher.start()
        begun = time.monotonic()
        error: Exception | None = None
        try:
            receipt = self.client.update_weights(source(), timeout=TIMEOUT)
            self.counts["updates"] += 1
            if receipt.version <= self.acknowledged or receipt.version in self.sent:
                self.violated(f"v{receipt.version} was acknowledged twice")
            self.acknowledged, self.sent[receipt.version] = receipt.version, which
        except RolloutError as failed:
            self.counts["failed"] += 1
            error = failed
            if isinstance(failed, EngineRestarted):
                self.violated(f"the fleet's epoch is another: {failed}")
        finally:
            over.set()
        for thread in (watcher, staging):
            if thread.ident is not None:
                thread.join(LIMIT)
        if (took := time.monotonic() - begun) > LIMIT:
            self.violated(f"an update took {took:.0f} s")
        return error

    def wait_phase(self, phase: str, version: int, over: threading.Event) -> bool:
        if phase == "at rest":
            return True
        record = self.disk.folder / "record" / "fleet.sqlite"
        clients = [RolloutClient(m.address, timeout=2.0, keeps_epoch=False) for m in self.members]
        try:
            while not over.is_set():
                if phase == "written":
                    if record.stat().st_mtime_ns != self.record:
                        return True
                elif any(self.is_at(client, phase, version) for client in clients):
                    return True
                time.sleep(0.0005)
            return False
        finally:
            for client in clients:
                client.close()

    @staticmethod
    def is_at(client: RolloutClient, phase: str, version: int) -> bool:
        try:
            info = client.info()
        except RolloutError:
            return False
        return bool(info.prepared) if phase == "prepared" else info.version >= version

    # ---- what must be true then ----

    def recover(self) -> None:
        for place in (self.front, *self.members):
            if place.process.poll() is not None:
                self.violated(f"{place.name} has ended: {place.log.read_text()[-500:]}")
        if not eventually(self.all_serve, LIMIT):
            self.violated(f"they do not all serve: {self.rows()}")

    def rows(self) -> dict[str, str]:
        try:
            return dict(self.client.metrics().members)
        except RolloutError as error:
            return {"front": str(error)}

    def all_serve(self) -> bool:
        rows = self.rows()
        return len(rows) == len(self.members) and all(
            row.startswith("serving") for row in rows.values()
        )

    def goes_through(self) -> bool:
        """Whether an update does to which nothing happens."""
        if (error := self.update("at rest", [])) is None:
            return True
        print(f"again, after {error!r}", file=sys.stderr, flush=True)
        self.recover()
        self.find_out()
        return False

    def find_out(self) -> None:
        """What is live where no answer has said so."""
        version = self.client.weight_info().version
        if version not in self.sent:
            equal = (w for w in self.tried if self.client.check_weights(self.weights(w)).equal)
            self.sent[version] = next(equal, -1)
            self.counts["found_out"] += 1
            if self.sent[version] < 0:
                self.violated(f"v{version} is live, and nobody sent those weights")
        self.tried = []

    def check(self) -> None:
        info = self.client.weight_info()
        if info.epoch != self.epoch:
            self.violated("the fleet has another epoch")
        if info.version < self.acknowledged:
            self.violated(f"v{info.version} is live, and v{self.acknowledged} was acknowledged")
        weights = list(self.weights(self.sent[info.version]).items())
        for who, address in [("the front", None), *((m.name, m.address) for m in self.members)]:
            client = self.client if address is None else Rollout.connect(address, timeout=20.0)
            found = client.weight_info()
            if found.version != info.version or found.prepared:
                self.violated(f"{who} has v{found.version}, {found.state}, not v{info.version}")
            elif not client.check_weights(weights).equal:
                self.violated(f"{who} has other weights as v{info.version}")
            if address is not None:
                client.shutdown()
        self.counts["checks"] += 1

    # ---- who samples ----

    def sample(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        while not self.over.is_set():
            prompt = [*range(40, 60), *draw.choices(range(3, 300), k=6)]
            params = SamplingParams(
                seed=draw.randrange(1 << 30), max_tokens=draw.choice((8, 40, 160)), ignore_eos=True
            )
            floor, outages, last, again = self.acknowledged, self.outages, None, False
            excused = self.front_fails.is_set()
            try:
                if draw.random() < 0.5:
                    [last] = self.client.generate([prompt], params)
                    self.counts["unstreamed"] += 1
                    told = last.outputs[0]  # its first token's KV is not of who gave it
                    again = told.kv_spans[0].version != told.weight_versions[0].version
                else:
                    for output in self.client.stream(prompt, params):
                        again |= last is not None and not goes_on(
                            last.outputs[0], output.outputs[0]
                        )
                        last = output
            except RolloutError as error:
                if excused or self.front_fails.is_set() or outages != self.outages:
                    self.counts["refused"] += 1
                    self.over.wait(0.1)
                    continue
                self.violated(f"a client's call failed: {error!r}")
                return
            self.count_below("the front", last.outputs[0].weight_versions, floor)
            self.counts["completions"] += 1
            if again and len(last.outputs[0].weight_versions) > 1:
                # What its KV is of now is not what tokens saw that came before.
                self.counts["went_on_elsewhere"] += 1
            elif self.done.qsize() < 40:
                self.done.put((prompt, last.outputs[0]))

    def ask(self, member: Place) -> None:
        """Once it was a member of the fleet: until then it serves what it was started with."""
        while not self.over.wait(0.3):
            floor = self.acknowledged
            try:
                with Rollout.connect(member.address, timeout=2.0) as engine:
                    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
            except RolloutError:
                self.counts["asked_refused"] += 1
                continue
            spans = output.outputs[0].weight_versions
            if any(span.version for span in spans):
                self.counts["asked"] += 1
                self.count_below(member.name, spans, floor)

    def count_below(self, who: str, spans, floor: int) -> None:
        if any(span.version < floor for span in spans):
            self.violated(f"{who} gave tokens of {spans}, and v{floor} had been acknowledged")

    def score(self) -> None:
        scores = self.rescorer.scores
        while not self.done.empty():
            prompt, completion = self.done.get()
            versions = {
                span.version for span in (*completion.kv_spans, *completion.weight_versions)
            }
            unknown = versions - self.sent.keys()
            if any(version > self.acknowledged for version in unknown):
                self.violated(f"tokens of versions {unknown}, of which nobody knows")
            elif not unknown:  # else: between two that are known, committed without an answer
                self.rescorer.check(prompt, completion)
        for wrong in scores.wrong[:5]:
            self.violated(wrong)
        scores.wrong.clear()

    def close(self) -> None:
        self.over.set()
        if self.disk.is_own:
            self.disk.thaw()
        for place in (self.front, *self.members):
            place.close()
        self.disk.close()


def goes_on(before, after) -> bool:
    """Whether what had been computed of a completion is as it was."""
    old, new = _each(before.kv_spans), _each(after.kv_spans)
    return new[: len(old)] == old


def _each(spans) -> list[int]:
    return [span.version for span in spans for _ in range(span.start, span.stop)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its disk is unmounted all the same
    with tempfile.TemporaryDirectory(prefix="rollout-soak-") as folder:
        soak = FleetSoak(Path(folder), args.seed, args.members)
        begun = time.monotonic()
        try:
            soak.run(args.seconds, args.clients)
        finally:
            soak.close()
        scores = soak.rescorer.scores
        print(
            json.dumps(
                {
                    "seconds": round(time.monotonic() - begun, 1), "seed": args.seed,
                    **dict(soak.counts), "faults_by_kind": dict(soak.kinds),
                    "by_phase": dict(soak.hit), "own_disk": soak.disk.is_own,
                    "tokens_checked": scores.checked, "tokens_checked_of_mixed_kv": scores.mixed,
                    "tokens_not_checkable": scores.unknown,
                    "worst_logprob_difference": scores.worst, "violations": len(soak.violations),
                }
            ),
            flush=True,
        )  # fmt: skip
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())

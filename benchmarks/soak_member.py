"""One engine of the soak: what is done to it, who samples from it, and what must have been true."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rescore import Rescorer, Scores
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Rollout, RolloutError, SamplingParams
from rollout.errors import DeadlineExceeded, EngineError
from rollout.kernels import digest
from rollout.testing.faults import Fault, Faulty
from rollout.weight_sync.versions.reader import VersionSource, folder
from rollout.weight_sync.versions.store import LocalStore
from rollout.weight_sync.versions.writer import VersionWriter
from rollout.weights import Box

TIMEOUT = 4.0  # of every update
LIMIT = 4 * TIMEOUT + 4  # seconds after which an update, with whatever fault, has ended
GAP = 15.0  # seconds without a token that a client accepts
TRANSPORTS = ("auto", "inline", "broadcast", "ipc", "p2p", "disk")
MOST_WAITING = 200  # completions kept to be scored
MOST_STORED = 6  # versions kept on disk

Weights = dict[str, torch.Tensor]


class Life:
    """An engine from its start to its end, and what each of its versions is made of."""

    def __init__(self, soak, tp: int, undo: str) -> None:
        self.soak, self.undo = soak, undo
        self.engine = Rollout(
            soak.path, tensor_parallel_size=tp, device="cpu", dtype="float32", num_threads=1,
            num_kv_blocks=512, max_model_len=512, timeout=20.0, undo=undo,
        )  # fmt: skip
        info = self.engine._async.backend.core.rank_info
        self.ranks = sorted({reply["pid"] for reply in info} - {os.getpid()})
        self.remote = Rollout.connect(self.engine.address, timeout=20.0)
        self.names = [meta.name for meta in self.engine.weight_info().tensors]
        self.content = {0: dict.fromkeys(self.names, 0)}  # by version: which set each tensor is of
        self.version = 0
        self.sleeps = 0  # begun; each has all KV computed again, by what is live then
        self.rescorer = Rescorer(soak.path, self.weights_of)

    def weights_of(self, version: int) -> Weights:
        content = self.content[version]
        sets = {which: self.soak.weights(which) for which in set(content.values())}
        return {name: sets[which][name] for name, which in content.items()}

    def close(self) -> None:
        self.remote.shutdown()
        self.engine.shutdown()


class Member:
    """A place for an engine: when one dies, the next takes it. One thread does things to it."""

    def __init__(self, soak, tp: int, clients: int, every: float) -> None:
        self.soak, self.tp, self.name, self.every = soak, tp, f"tp{tp}", every
        self.random = random.Random(f"{soak.seed}/{tp}")
        self.scores: list[Scores] = []
        self.life = self._new_life()
        self.next_set, self.preempted = 1, 0
        self.outages, self.down = 0, threading.Event()
        self.started, self.due_once = time.monotonic(), {"sleep": 0.2, "kill": 0.3}
        self.module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(soak.path))
        self.folder = tempfile.mkdtemp(prefix="rollout-soak-")
        self.stored = 0
        self.writers = {
            encoding: VersionWriter(
                LocalStore(Path(self.folder) / encoding), dtype=torch.float32, encoding=encoding,
                anchor_every=3, bucket_bytes=16 << 10,
            )
            for encoding in ("full", "delta")
        }  # fmt: skip
        self.done: queue.Queue = queue.Queue(MOST_WAITING)
        self.threads = [
            threading.Thread(target=self._clients_loop, args=(i,)) for i in range(clients)
        ]
        self.threads += [threading.Thread(target=loop) for loop in (self._updates, self._scoring)]

    def _new_life(self) -> Life:
        life = Life(self.soak, self.tp, self.random.choice(("shadow", "sparse", "host")))
        self.scores.append(life.rescorer.scores)
        return life

    @contextlib.contextmanager
    def _outage(self) -> Iterator[None]:
        """Requests may be refused or ended by an engine error meanwhile, but no longer."""
        was = self.down.is_set()  # one may lie within another
        self.down.set()
        self.outages += 1
        try:
            yield
        finally:
            if not was:
                self.down.clear()

    # ---- what is done to it ----

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
        event = self._overdue() or self.random.choices(
            ("update", "roll back", "sleep", "kill"), (0.86, 0.07, 0.05, 0.02)
        )[0]  # fmt: skip
        if event == "roll back":
            self._roll_back()
        elif event == "sleep":
            self._sleep()
        elif event == "kill" and self.life.ranks:
            self._kill_a_rank()
        else:
            self._update(self._fault())

    def _overdue(self) -> str | None:
        """What even a short course has once, at a fraction of its time."""
        passed = (time.monotonic() - self.started) / self.soak.seconds
        for event, when in self.due_once.items():
            if passed > when:
                del self.due_once[event]
                return event
        return None

    def _roll_back(self) -> None:
        life = self.life
        try:
            receipt = life.engine.rollback(TIMEOUT)
        except RolloutError:
            return  # there was nothing to go back to; checked below like every failure
        if (life.version - 1) not in life.content:
            self.soak.violated(f"{self.name}: rolled back beyond the first version")
        self._committed(receipt, life.content[life.version - 1], life.names)
        self.soak.count(rollbacks=1)

    def _sleep(self) -> None:
        """Either level; weights come back first, and an update may while the KV cache sleeps."""
        life, level = self.life, self.random.choice((1, 1, 2))
        life.sleeps += 1
        with self._outage():
            life.engine.sleep(level, timeout=TIMEOUT)
            self._must_refuse()
            life.engine.wake_up(["weights"], timeout=TIMEOUT)
            if level == 2 or self.random.random() < 0.5:
                self._must_refuse()
                self._update(None, good=True)
            self._must_refuse()
            life.engine.wake_up(["kv_cache"], timeout=TIMEOUT)
        self.soak.count(sleeps=1)

    def _must_refuse(self) -> None:
        with contextlib.suppress(EngineError):
            self.life.engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
            self.soak.violated(f"{self.name}: generated while asleep")

    def _kill_a_rank(self) -> None:
        """At rest, or in the midst of an update; then another engine takes its place."""
        life, pid = self.life, self.random.choice(self.life.ranks)
        with self._outage():
            if self.random.random() < 0.5:
                self.soak.fault("kill rank at rest")
                os.kill(pid, signal.SIGKILL)
            else:
                phase = self.random.choice(("connect", "bucket", "seal"))
                self._update(Fault("kill", phase, bucket=self.random.randrange(6), pid=pid))
            started = time.monotonic()
            while time.monotonic() - started < LIMIT:
                try:
                    life.engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
                except EngineError:
                    break
            else:
                self.soak.violated(f"{self.name}: an engine without rank {pid} does not say so")
            self.preempted += life.engine.metrics().preemptions_total
            life.close()
            self.life = self._new_life()
        self.soak.count(restarts=1)

    def _update(self, fault: Fault | None, good: bool = False) -> None:
        """One update over whatever ways; ``good``: it must take, and nothing is wrong with it."""
        draw, life = self.random, self.life
        which, self.next_set = self.next_set, self.next_set + 1
        transport = draw.choice(TRANSPORTS)
        partial = not good and transport != "p2p" and draw.random() < 0.15
        names = [n for n in life.names if "layers.1" in n] if partial else life.names
        weights = self.soak.weights(which)
        staging = draw.choices(("auto", "host", "none"), (0.75, 0.1, 0.15))[0]
        options = {
            "transport": self._transport(transport, fault), "staging": staging,
            "encoding": draw.choice(("auto", "full", "delta")), "partial": partial,
            "in_flight": draw.choice(("keep", "keep", "keep", "recompute", "abort", "wait")),
            "bucket_bytes": draw.choice((8, 16, 64)) << 10, "label": f"set {which}",
            "timeout": TIMEOUT,
        }  # fmt: skip
        if good:
            options["in_flight"] = "keep"
        if fault is not None:
            killed = fault.kind == "kill"
            self.soak.fault(f"{fault.kind} {'rank at ' if killed else ''}{fault.phase}")
        source = self._source(transport, {n: weights[n] for n in names})
        handle = draw.choice((life.engine, life.remote))
        torn = contextlib.nullcontext()
        if staging == "none" and life.undo == "shadow":
            torn = self._outage()
        started = time.monotonic()
        with torn:
            try:
                receipt = handle.update_weights(source, **options)
            except RolloutError as error:
                self.soak.count(failed=1)
                busy = options["in_flight"] == "wait" and isinstance(error, DeadlineExceeded)
                if fault is None and not busy:  # long requests may outlast the deadline of "wait"
                    raise AssertionError(f"a good update failed: {error!r}") from error
                if life.engine.weight_info().state == "broken" and fault.kind != "kill":
                    self._mend()
                return
            finally:
                if (took := time.monotonic() - started) > LIMIT:
                    self.soak.violated(f"{self.name}: {fault} on {transport} took {took:.1f} s")
        self.soak.count(updates=1, in_place=staging == "none")
        self.soak.transports[transport] += 1
        content = {**life.content[life.version], **dict.fromkeys(names, which)}
        self._committed(receipt, content, names)

    def _mend(self) -> None:
        """An update without staging failed, and nothing was kept: only a full one may follow."""
        if self.life.undo != "shadow":
            self.soak.violated(f"{self.name}: broken although undo={self.life.undo!r}")
        self._must_refuse()
        self._update(None, good=True)
        self.soak.count(mended=1)

    def _transport(self, transport: str, fault: Fault | None):
        """What ``update_weights`` gets; a version from disk goes on by another transport."""
        transport = self.random.choice(TRANSPORTS[1:4]) if transport == "disk" else transport
        if fault is None:
            return transport
        return Faulty("inline" if transport == "auto" else transport, fault)

    def _source(self, transport: str, weights: Weights):
        if transport == "p2p":
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(weights[name])
            return self.module
        if transport == "disk":
            whole = len(weights) == len(self.life.names)
            encoding = self.random.choice(("full", "delta")) if whole else "full"
            self.stored += 1
            self.writers[encoding].write(weights, self.stored, timeout=TIMEOUT)
            store = LocalStore(Path(self.folder) / encoding)
            kept = sorted(path for path in store.root.iterdir() if path.is_dir())
            for path in kept[:-MOST_STORED]:
                shutil.rmtree(path)
            assert kept[-1].name == folder(self.stored)
            return VersionSource(store, self.stored, dtype=torch.float32)
        return weights

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
        if kind == "stall" and self.life.ranks and draw.random() < 0.7:
            pid = draw.choice(self.life.ranks)
        return Fault(
            kind, phase, bucket=draw.randrange(6), bit=draw.randrange(1 << 20), seconds=0.3, pid=pid
        )

    def _killed_trainer(self) -> None:
        self.soak.fault("kill trainer")
        transport = self.random.choice(TRANSPORTS[1:4])
        soak = Path(__file__).with_name("soak.py")
        command = [sys.executable, str(soak), self.soak.path, "--die", self.life.engine.address]
        done = subprocess.run([*command, transport], timeout=60, check=False, capture_output=True)
        if done.returncode != -9:
            self.soak.violated(f"the trainer that was to die: {done.stderr[-500:]!r}")
        self.soak.count(failed=1)

    def _committed(self, receipt, content: dict[str, int], names: list[str]) -> None:
        life = self.life
        life.version += 1
        if receipt.version != life.version:
            self.soak.violated(
                f"{self.name}: v{receipt.version} came where v{life.version} was due"
            )
        life.content[life.version] = content
        mine = life.weights_of(life.version)
        wanted = sum(digest(t, tuple(t.shape), Box.full(tuple(t.shape)))
                     for n, t in mine.items() if n in set(names)) % 2**64  # fmt: skip
        if receipt.digest != wanted:
            self.soak.violated(f"{self.name}: the receipt of v{life.version} has another digest")

    def _verify(self) -> None:
        """The engine is where the trainer's books say that it is."""
        life, deadline = self.life, time.monotonic() + TIMEOUT
        while (info := life.engine.weight_info()).state != "idle" and time.monotonic() < deadline:
            time.sleep(0.02)
        if (info.state, info.version) != ("idle", life.version):
            self.soak.violated(f"{self.name}: {info.state} at v{info.version}, not v{life.version}")
        report = life.engine.check_weights(life.weights_of(life.version), timeout=TIMEOUT)
        if not report.equal:
            self.soak.violated(f"{self.name}: v{life.version} differs: {report.differing[:3]}")
        self.soak.count(checks=1)

    # ---- generation ----

    def _clients_loop(self, number: int) -> None:
        draw = random.Random(f"{self.soak.seed}/{self.name}/{number}")
        shared = list(range(40, 80))  # a prefix that the cache would like
        while not self.soak.over.is_set():
            prompt = [*shared[: draw.choice((0, 20, 40))], *draw.choices(range(3, 300), k=6)]
            params = SamplingParams(
                seed=draw.randrange(1 << 30), max_tokens=draw.choice((8, 40, 160)), ignore_eos=True
            )
            life, outages, began_down = self.life, self.outages, self.down.is_set()
            engine = (life.engine, life.remote)[number % 2]
            last, arrived, sleeps = None, time.monotonic(), life.sleeps
            try:
                for output in engine.stream(prompt, params):
                    now = time.monotonic()
                    if now - arrived > GAP and self.outages == outages:
                        self.soak.violated(f"{self.name}: {now - arrived:.1f} s without a token")
                    last, arrived = output, now
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                excused = began_down or self.down.is_set() or self.outages != outages
                if isinstance(error, EngineError) and (excused or self.life is not life):
                    self.soak.count(refused=1)
                    self.soak.over.wait(0.1)
                    continue
                self.soak.violated(f"{self.name}: client: {type(error).__name__}: {error}")
                return
            self.soak.count(tokens=len(last.outputs[0].token_ids), completions=1)
            if life.sleeps != sleeps:  # spans tell the KV of the end, not what older tokens saw
                self.soak.count(slept_through=len(last.outputs[0].token_ids))
            elif not self.done.full():
                self.done.put((life, prompt, last.outputs[0]))

    def _scoring(self) -> None:
        while not (self.soak.over.is_set() and self.done.empty()):
            try:
                life, prompt, completion = self.done.get(timeout=0.2)
            except queue.Empty:
                continue
            newest = max((s.version for s in completion.kv_spans), default=0)
            deadline = time.monotonic() + LIMIT  # tokens may outrun the trainer's own books
            while newest not in life.content and time.monotonic() < deadline:
                time.sleep(0.01)
            try:
                life.rescorer.check(prompt, completion)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                self.soak.violated(f"{self.name}: scoring: {type(error).__name__}: {error}")

    # ---- the end ----

    def end(self) -> None:
        for thread in self.threads:
            thread.join(90)
            if thread.is_alive():
                self.soak.violated(f"{self.name}: a thread does not end")
        for wrong in [wrong for scores in self.scores for wrong in scores.wrong][:5]:
            self.soak.violated(f"{self.name}: {wrong}")
        if self.preempted + self.life.engine.metrics().preemptions_total:
            self.soak.violated(f"{self.name}: preempted, which hides the context of tokens")

    def close(self) -> None:
        self.life.close()
        shutil.rmtree(self.folder, ignore_errors=True)

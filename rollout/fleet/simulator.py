"""A fleet in virtual time: the coordinator's own code among members and a network that fail.

    python -m rollout.fleet.simulator --members 64 --updates 1000 --faults 1000 --seed 0

Members are models of engines (one version live, at most one prepared, a fence, a lease by a clock
that drifts); messages take random times, are lost, and come late; members and the coordinator crash
and come back, the latter with what was durable. What is checked at every step:

- no version has two contents, and nothing is served that no update brought;
- once a commit of v is answered, no member serves below v to who asks after that;
- nothing that was answered is lost while a member that holds it lives;
- when faults end, all members serve again what was promised.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollout.errors import RolloutError
from rollout.fleet.actions import Action, Ask, Check, Ended, Fill, Promise, Tell, Write
from rollout.fleet.coordinator import DRIFT, Coordinator, Phase, Status
from rollout.weight_sync.protocol.membership import Grant, Standing
from rollout.weight_sync.protocol.messages import Decision

LEASE = 2.0
TICK = LEASE / 8
CALM = 60.0  # seconds without faults at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """``delay``: mean seconds of a message. ``loss``: the share that is lost. ``stage``: mean
    seconds in which a member takes an update's bytes. ``disk``: mean seconds of a durable write.
    """

    delay: float = 0.002
    loss: float = 0.0
    stage: float = 0.5
    disk: float = 0.005


@dataclass(frozen=True, slots=True)
class _Staged:
    update_id: str
    version: int
    digest: int


@dataclass(slots=True)
class _Engine:
    """A member, as far as updates and leases go."""

    name: str
    epoch: int
    rate: float
    version: int = 0
    digest: int = 1
    fence: int = 0
    up: bool = True
    dead: bool = False  # for good: another process will come in its place
    cut: bool = False  # no message reaches it or leaves it
    until: float | None = None  # of its lease, by its clock
    newest: tuple[int, int] = (0, 0)  # grant
    staged: _Staged | None = None
    prepared: _Staged | None = None
    ended: dict[str, bool] = field(default_factory=dict)

    def clock(self, now: float) -> float:
        return 1000.0 + now * self.rate

    def serves(self, now: float) -> bool:
        return self.up and (self.until is not None and self.clock(now) < self.until)


@dataclass(slots=True)
class Findings:
    """What a run came to. ``skew``: seconds between the first and the last member of a commit."""

    commits: int = 0
    aborts: int = 0
    faults: int = 0
    reads: int = 0
    refused: int = 0
    refounded: int = 0
    seconds: float = 0.0
    skew: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class Violation(AssertionError):  # noqa: N818
    """A promise was broken."""


class Simulation:
    """One course, decided by ``seed`` alone."""

    def __init__(
        self,
        *,
        members: int,
        seed: int,
        quorum: int = 2,
        weather: Weather | None = None,
        fault_rate: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.weather, self.quorum = weather or Weather(), quorum
        self.fault_rate = fault_rate
        self.now = 0.0
        self.found = Findings()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._epochs = itertools.count(1)
        self.engines = {f"m{n}": self._engine(f"m{n}") for n in range(members)}
        self.durable = Promise(fence=0, epoch=1, version=0, digest=0)
        self.contents: dict[tuple[int, int], int] = {(1, 0): 1}  # (fleet's epoch, version)
        self.floor = (1, 0)  # (fleet's epoch, version) of the last commit that was answered
        self.life = 0  # of the coordinator
        self.coordinator: Coordinator | None = None
        self._outcome: Callable[[Ended], None] | None = None
        self._commit_times: dict[str, list[float]] = {}
        self._begin_life()

    # ---- a course ----

    def run(self, updates: int, faults: int) -> Findings:
        """So many updates, one after the other, while faults happen; then calm."""
        if faults:
            self._later(self.rng.expovariate(self.fault_rate or 1.0), self._fault, faults)
        self._later(LEASE, self._update, updates, 1)
        self._later(0.01, self._read)
        while self._events and (self.found.commits + self.found.aborts) < updates:
            self._step()
        self.fault_rate = 0.0
        self._mend_all()
        end = self.now + CALM
        while self._events and self.now < end:
            self._step()
        self._check_end()
        self.found.seconds = self.now
        return self.found

    def _step(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()

    def _later(self, delay: float, fn: Callable[..., None], *args: object) -> None:
        event = lambda: fn(*args)  # noqa: E731
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    # ---- the coordinator's process ----

    def _begin_life(self) -> None:
        self.life += 1
        self.durable = replace(self.durable, fence=self.durable.fence + 1)
        state = Coordinator(self.durable, quorum=self.quorum, lease=LEASE, now=self.now,
            earlier=LEASE if self.life > 1 else 0.0,
        )  # fmt: skip
        self.coordinator = state
        for name in self.engines:
            self._do(state.add(name, self.now))
        self._later(TICK, self._tick, self.life)

    def _tick(self, life: int) -> None:
        if self.coordinator is not None and life == self.life:
            self._do(self.coordinator.tick(self.now))
            self._later(TICK, self._tick, life)

    def _feed(self, life: int, event: Callable[[Coordinator], list[Action]]) -> None:
        if self.coordinator is not None and life == self.life:
            self._do(event(self.coordinator))

    def _crash(self) -> None:
        """With it go the streams of an update that is not prepared."""
        self.coordinator = None
        for engine in self.engines.values():
            engine.staged = None
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            outcome(Ended("", committed=False, reason="the coordinator crashed"))
        self._later(self.rng.uniform(0.1, 10.0), self._begin_life)

    def _do(self, actions: list[Action]) -> None:
        life = self.life
        for action in actions:
            if isinstance(action, Ask):
                self._ask(action, life)
            elif isinstance(action, Tell):
                self._tell(action, life)
            elif isinstance(action, Check):
                self._check(action, life)
            elif isinstance(action, Fill):
                self._fill(action, life)
            elif isinstance(action, Write):
                self._later(self._some(self.weather.disk), self._written, action, life)
            elif self._outcome is not None:
                outcome, self._outcome = self._outcome, None
                outcome(action)

    def _written(self, action: Write, life: int) -> None:
        if life != self.life:
            return  # whoever wrote it has died: the file is another's
        old, self.durable = self.durable, action.promise
        if action.promise.epoch != old.epoch:
            self.found.refounded += 1
            self._check_lost(old)
            self.floor = (action.promise.epoch, action.promise.version)
        key = (action.promise.epoch, action.promise.version)
        digest = action.promise.digest
        if digest and self.contents.setdefault(key, digest) != digest:
            raise Violation(f"version {key} has two contents")
        if self.coordinator is None:
            return  # it was durable, and nobody lived to know
        self._feed(life, lambda c: c.written(action.promise, self.now))

    def _check_lost(self, old: Promise) -> None:
        """A new epoch gives up what was promised: then nobody may hold it any more."""
        for engine in self.engines.values():
            if not engine.dead and (engine.version, engine.digest) == (old.version, old.digest):
                raise Violation(f"version {old.version} was given up, but {engine.name} holds it")

    # ---- messages ----

    def _some(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)

    def _call(
        self,
        name: str,
        life: int,
        serve: Callable[[_Engine], object],
        reply: Callable[[object], Callable[[Coordinator], list[Action]]],
        work: float = 0.0,
    ) -> None:
        """One call of a member: ``reply`` makes an event of its answer, or of an error."""
        engine, answered = self.engines[name], [False]

        def arrive() -> None:
            if not engine.up or engine.cut:
                return
            try:
                result: object = serve(engine)
            except RolloutError as error:
                result = error
            if self.rng.random() >= self.weather.loss:
                self._later(self._some(self.weather.delay), answer, result)

        def answer(result: object) -> None:
            if not answered[0] and not engine.cut:
                answered[0] = True
                self._feed(life, reply(result))

        def expire() -> None:
            if not answered[0]:
                answered[0] = True
                self._feed(life, reply(TimeoutError("no answer")))

        if self.rng.random() >= self.weather.loss:
            self._later(self._some(self.weather.delay) + work, arrive)
        self._later(1.0 + 10 * work, expire)

    def _ask(self, action: Ask, life: int) -> None:
        def reply(result: object) -> Callable[[Coordinator], list[Action]]:
            if isinstance(result, Standing):
                standing = result
                return lambda c: c.stood(action.member, action.grant, standing, self.now)
            return lambda c: c.silent(action.member, str(result), self.now)

        self._call(action.member, life, lambda e: self._grant(e, action.grant), reply)

    def _grant(self, engine: _Engine, grant: Grant) -> Standing:
        self._fenced(engine, grant.fence)
        if grant.epoch is not None and grant.epoch != engine.epoch:
            raise RolloutError("another life")
        if grant.epoch is not None and (grant.fence, grant.serial) >= engine.newest:
            engine.until, engine.newest = grant.until, (grant.fence, grant.serial)
        return Standing(
            epoch=engine.epoch, clock=engine.clock(self.now), version=engine.version,
            state="running" if engine.serves(self.now) else "fenced",
            prepared="" if engine.prepared is None else engine.prepared.update_id,
            fence=engine.fence,
        )  # fmt: skip

    def _fenced(self, engine: _Engine, fence: int) -> None:
        if fence < engine.fence:
            raise RolloutError("stale fence")
        engine.fence = fence

    def _tell(self, action: Tell, life: int) -> None:
        def reply(result: object) -> Callable[[Coordinator], list[Action]]:
            why = "" if result is None else str(result)
            final = isinstance(result, RolloutError)
            return lambda c: c.decided(
                action.decision.update_id, action.member, why, self.now, final=final
            )

        self._call(action.member, life, lambda e: self._decide(e, action.decision), reply)

    def _decide(self, engine: _Engine, decision: Decision) -> None:
        assert decision.fence is not None
        self._fenced(engine, decision.fence)
        ended = engine.ended.get(decision.update_id)
        if ended is not None:
            if ended is not decision.commit:
                raise RolloutError("it ended the other way")
            return
        prepared = engine.prepared
        if prepared is None or prepared.update_id != decision.update_id:
            raise RolloutError("not prepared")
        engine.prepared = None
        engine.ended[decision.update_id] = decision.commit
        if decision.commit:
            self._go_live(engine, prepared)
            self._commit_times.setdefault(decision.update_id, []).append(self.now)

    def _go_live(self, engine: _Engine, staged: _Staged) -> None:
        engine.version, engine.digest = staged.version, staged.digest

    def _check(self, action: Check, life: int) -> None:
        def reply(result: object) -> Callable[[Coordinator], list[Action]]:
            if isinstance(result, tuple):
                version, digest = result
                return lambda c: c.checked(action.member, version, digest, self.now)
            return lambda c: c.silent(action.member, str(result), self.now)

        def held(engine: _Engine) -> tuple[int, int]:
            return engine.version, engine.digest

        self._call(action.member, life, held, reply, work=self._some(0.1))

    def _fill(self, action: Fill, life: int) -> None:
        donor = self.engines[action.donor]

        def fill(engine: _Engine) -> tuple[int, int]:
            if not donor.up or donor.cut or donor.version != action.version:
                raise RolloutError("the donor has gone on")
            if engine.prepared is not None or engine.version >= action.version:
                raise RolloutError("not now")
            self._go_live(engine, _Staged("", donor.version, donor.digest))
            return engine.version, engine.digest

        def reply(result: object) -> Callable[[Coordinator], list[Action]]:
            if isinstance(result, tuple):
                version, digest = result
                return lambda c: c.checked(action.member, version, digest, self.now)
            return lambda c: c.unfilled(action.member, str(result), self.now)

        self._call(action.member, life, fill, reply, work=self._some(self.weather.stage))

    # ---- the trainer ----

    def _update(self, left: int, number: int) -> None:
        if not left:
            return
        state, life, update_id = self.coordinator, self.life, f"u{number}"
        if state is None:
            self._later(0.5, self._update, left, number)
            return
        try:
            names, version = state.begin(update_id, None, self.now)
        except RolloutError:
            self._later(0.5, self._update, left, number)
            return
        staged, began = _Staged(update_id, version, self.rng.getrandbits(60) | 1), self.now
        self._do(state.commit(update_id, self.now))

        def ended(action: Ended) -> None:
            if action.committed:
                self.found.commits += 1
                self.floor = (self.durable.epoch, version)
                times = self._commit_times.pop(update_id, [self.now])
                self.found.skew.append(max(times) - min(times))
                self.found.total.append(self.now - began)
            else:
                self.found.aborts += 1
            self._later(self._some(0.2), self._update, left - 1, number + 1)

        self._outcome = ended
        for name in names:
            self._part(name, life, staged)

    def _part(self, name: str, life: int, staged: _Staged) -> None:
        fence = self.durable.fence

        def vote(engine: _Engine) -> str:
            self._fenced(engine, fence)
            if engine.prepared is not None or engine.version >= staged.version:
                raise RolloutError("it cannot take part")
            engine.prepared = staged
            return "yes"

        def reply(result: object) -> Callable[[Coordinator], list[Action]]:
            if result == "yes":
                return lambda c: c.voted(staged.update_id, name, staged.digest, self.now)
            return lambda c: c.lost(staged.update_id, name, str(result), self.now)

        self._call(name, life, vote, reply, work=self._some(self.weather.stage))

    # ---- clients ----

    def _read(self) -> None:
        """Somebody asks a member, whichever, as a front that knows nothing would."""
        engine = self.rng.choice(list(self.engines.values()))
        self.found.reads += 1
        if not engine.serves(self.now):
            self.found.refused += 1
        else:
            epoch, floor = self.floor
            if epoch == self.durable.epoch and engine.version < floor:
                raise Violation(
                    f"at {self.now:.3f} {engine.name} serves {engine.version}, below the "
                    f"{floor} that was answered"
                )
            known = self.contents.get((self.durable.epoch, engine.version))
            if known is not None and known != engine.digest and engine.version >= floor:
                raise Violation(f"{engine.name} serves other contents as {engine.version}")
        self._later(self._some(0.02), self._read)

    # ---- faults ----

    def _engine(self, name: str) -> _Engine:
        rate = 1 + self.rng.uniform(-DRIFT, DRIFT) / 2.1
        return _Engine(name=name, epoch=next(self._epochs), rate=rate)

    def _fault(self, left: int) -> None:
        if not left or not self.fault_rate:
            return
        self.found.faults += 1
        engine = self.rng.choice(list(self.engines.values()))
        kind = self.rng.choice(("crash", "cut", "cut", "stop", "coordinator"))
        if kind == "crash" and engine.up:
            engine.up, engine.dead = False, True
            self._later(self.rng.uniform(0.5, 20.0), self._come_back, engine)
        elif kind == "cut" and not engine.cut:
            engine.cut = True
            self._later(self.rng.uniform(0.1, 8.0), self._join_up, engine)
        elif kind == "stop" and engine.up:
            engine.up = False
            self._later(self.rng.uniform(0.1, 6.0), self._go_on, engine, engine.epoch)
        elif kind == "coordinator" and self.coordinator is not None:
            self._crash()
        self._later(self.rng.expovariate(self.fault_rate), self._fault, left - 1)

    def _come_back(self, engine: _Engine) -> None:
        """As a new process, with the weights it was first started with."""
        fresh = _Engine(name=engine.name, epoch=next(self._epochs), rate=engine.rate)
        self.engines[engine.name] = fresh
        if self.coordinator is not None:
            self._do(self.coordinator.died(engine.name, self.now))
            self._do(self.coordinator.add(engine.name, self.now))

    def _go_on(self, engine: _Engine, epoch: int) -> None:
        if engine.epoch == epoch:
            engine.up = True

    def _join_up(self, engine: _Engine) -> None:
        engine.cut = False

    def _mend_all(self) -> None:
        self.weather = replace(self.weather, loss=0.0)
        for engine in self.engines.values():
            engine.cut = False

    def _check_end(self) -> None:
        state = self.coordinator
        if state is None or (state.update and state.update.phase is not Phase.STAGING):
            raise Violation("the fleet did not come to rest")
        idle = [m for m in state.members.values() if m.status is not Status.SERVING]
        if idle:
            raise Violation(f"at rest {idle[0].name} does not serve: {idle[0].why}")
        for engine in self.engines.values():
            if (engine.version, engine.digest) != (state.promise.version, state.promise.digest):
                raise Violation(f"at rest {engine.name} holds {engine.version}")
            if engine.prepared is not None:
                raise Violation(f"at rest {engine.name} waits for a decision")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--fault-rate", type=float, default=1.0, help="faults a second")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    course = Simulation(
        members=args.members, seed=args.seed, quorum=args.quorum,
        weather=Weather(loss=args.loss), fault_rate=args.fault_rate,
    )  # fmt: skip
    found = course.run(args.updates, args.faults)
    skew, total = sorted(found.skew), sorted(found.total)
    print(  # noqa: T201
        f"{found.commits} commits, {found.aborts} aborts, {found.faults} faults, {found.reads} "
        f"reads ({found.refused} refused), {found.refounded} epochs lost, {found.seconds:.0f} s; "
        f"commit skew p50 {skew[len(skew) // 2]:.4f} p99 {skew[len(skew) * 99 // 100]:.4f} s, "
        f"update p50 {total[len(total) // 2]:.3f} p99 {total[len(total) * 99 // 100]:.3f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

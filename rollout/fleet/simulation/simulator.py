"""A fleet in virtual time: the coordinator's own code among members and a network that fail.

    python benchmarks/simulated_fleets.py --members 64 --updates 1000 --faults 1000 --seed 0

Members are models of engines (``simulated_member``); messages take random times, are lost, and
come late; members and the coordinator crash and come back, are stopped and go on, clocks jump, the
disk is slow or full (``simulated_faults``). Updates and rollbacks. What is checked at every step:

- no version has two contents, and nothing is served that no update brought;
- once a commit of v is answered, no member serves below v to who asks after that;
- nothing that was answered is lost while a member that holds it lives;
- the adapters that are promised are those of the weights that are, and of what a rollback leads to;
- when faults end, all members serve again what was promised.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rollout.errors import EngineRestarted, RolloutError
from rollout.fleet.coordination.actions import (
    Action,
    Adapters,
    Ask,
    Check,
    Ended,
    Fill,
    Promise,
    Tell,
    Write,
)
from rollout.fleet.coordination.coordinator import Coordinator
from rollout.fleet.coordination.leases import DRIFT
from rollout.fleet.coordination.member import Status
from rollout.fleet.coordination.update import Phase
from rollout.fleet.late import late_at
from rollout.fleet.simulation.findings import Findings, Violation, Weather
from rollout.fleet.simulation.simulated_faults import Faults
from rollout.fleet.simulation.simulated_member import SimulatedMember, Staged
from rollout.fleet.simulation.simulated_time import Timeline
from rollout.weight_sync.protocol.adapters import HeldAdapter
from rollout.weight_sync.protocol.membership import Standing

LEASE = 2.0
TICK = LEASE / 8
ROLLBACKS = 0.1  # the share of updates that only go back
CALM = 60.0  # seconds without faults at the end

Event = Callable[[Coordinator], list[Action]]
Serve = Callable[[SimulatedMember], object]
Reply = Callable[[object], Event]  # to an answer, or to an error


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
        of_all: float | None = None,
    ) -> None:
        """``fault_rate``: faults a second. ``of_all``: the share of them that befalls what all
        depend on, the coordinator and its disk; None: as there are kinds of both, five of eleven.
        """
        self.of_all = of_all
        self.rng = random.Random(seed)
        self.weather, self.quorum = weather or Weather(), quorum
        self.fault_rate = fault_rate
        self.found = Findings()
        self._time = Timeline()
        self.later = self._time.later
        self._epochs = itertools.count(1)
        self.engines = {f"m{n}": self._engine(f"m{n}") for n in range(members)}
        self.durable = Promise(fence=0, epoch=1, version=0, digest=0)
        self.contents: dict[tuple[int, int], int] = {(1, 0): 1}  # (fleet's epoch, version)
        self.floor = (1, 0)  # (fleet's epoch, version) of the last commit that was answered
        self.promised: set[str] = set()  # updates that were durable
        self.life = 0  # of the coordinator that has the record
        self.coordinators: dict[int, Coordinator] = {}  # by life; earlier ones know no better
        self._outcome: Callable[[Ended], None] | None = None
        self._commit_times: dict[str, list[float]] = {}
        self._numbers = itertools.count(1)  # of updates
        self._resting = False
        self.faults = Faults(self)
        self.begin_life()

    @property
    def now(self) -> float:
        return self._time.now

    # ---- a course ----

    def run(self, updates: int, faults: int, over: Callable[[], bool] = lambda: False) -> Findings:
        """So many updates, one after the other, while faults happen; then calm. ``over`` is asked
        after each update whether that is to be the last.
        """
        if faults:
            self.later(self.rng.expovariate(self.fault_rate or 1.0), self._fault, faults)
        self.later(LEASE, self._updates, updates)
        self.later(0.01, self._read)
        ended = 0
        while ended < updates and self._time.step():
            before, ended = ended, self.found.commits + self.found.aborts
            if ended > before and over():
                break
        self.rest()
        return self.found

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self._time.step(end):
            pass
        self._time.now = end

    def rest(self) -> None:
        """No more faults: at the end all members serve what was promised, or ``Violation``."""
        self.fault_rate, self.weather = 0.0, replace(self.weather, loss=0.0)
        self._resting = True
        self.faults.end()
        self.pass_time(CALM)
        self._check_end()
        self.found.seconds = self.now

    # ---- coordinators ----

    @property
    def coordinator(self) -> Coordinator | None:
        """The one that has the record."""
        return self.coordinators.get(self.life)

    def begin_life(self) -> None:
        """A coordinator takes the record over, once it can write its fence."""
        if self.faults.disk_is_full:
            self.later(0.5, self.begin_life)
            return
        self.life += 1
        self.durable = replace(self.durable, fence=self.durable.fence + 1)
        state = Coordinator(self.durable, quorum=self.quorum, lease=LEASE, now=self.now,
            earlier=LEASE if self.life > 1 else 0.0,
        )  # fmt: skip
        self.coordinators[self.life] = state
        for name in self.engines:
            self._do(state.add(name, self.now), self.life)
        self.later(TICK, self._tick, self.life)

    def end_life(self, life: int) -> None:
        self.coordinators.pop(life, None)

    def _tick(self, life: int) -> None:
        if (state := self.coordinators.get(life)) is not None:
            stopped = self.faults.stopped(life)
            if not stopped:
                self._do(state.tick(self.now), life)
            self.later(stopped or TICK, self._tick, life)

    def feed(self, life: int, event: Event) -> None:
        if stopped := self.faults.stopped(life):
            self.later(stopped, self.feed, life, event)
            return
        if (state := self.coordinators.get(life)) is not None:
            self._do(event(state), life)

    def forget_update(self, why: str) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            outcome(Ended("", committed=False, reason=why))

    def _do(self, actions: list[Action], life: int) -> None:
        for action in actions:
            if isinstance(action, Ask):
                if life == self.life:
                    self._ask(action, life)
            elif isinstance(action, Tell):
                self._tell(action, life)
            elif isinstance(action, Check):
                self._check(action, life)
            elif isinstance(action, Fill):
                self._fill(action, life)
            elif isinstance(action, Write):
                delay = self.some(self.weather.disk) * self.faults.slowness
                self.later(delay, self._written, action, life, self.now)
            elif life == self.life and self._outcome is not None:
                outcome, self._outcome = self._outcome, None
                outcome(action)

    def _written(self, action: Write, life: int, asked: float) -> None:
        if life != self.life:  # the file is another's
            self.feed(life, lambda c: c.unwritten("another has the record", self.now))
            return
        if self.faults.disk_is_full:
            self.feed(life, lambda c: c.unwritten("the disk is full", self.now))
            return
        old, self.durable = self.durable, action.promise
        for digest, adapters in (
            (self.durable.digest, self.durable.adapters),
            (self.durable.before, self.durable.adapters_before),
        ):
            if adapters != (_adapters(digest) if digest else ()):
                raise Violation(f"{self.durable} has other adapters than its digests")
        if action.promise.epoch != old.epoch:
            self.found.refounded += 1
            self._check_lost(old, asked)
            self.floor = (action.promise.epoch, action.promise.version)
        key = (action.promise.epoch, action.promise.version)
        digest = action.promise.digest
        if digest and self.contents.setdefault(key, digest) != digest:
            raise Violation(f"version {key} has two contents")
        self.promised.add(action.promise.update_id)
        self.feed(life, lambda c: c.written(action.promise, self.now))

    def _check_lost(self, old: Promise, asked: float) -> None:
        """A new epoch gives up what was promised: then nobody may hold it any more, but who was
        about to end, and has not been heard of for a while.
        """
        for engine in self.engines.values():
            silent = engine.leaving and asked - engine.heard > LEASE
            held = (engine.version, engine.digest) == (old.version, old.digest)
            if held and not (engine.dead or silent):
                raise Violation(f"version {old.version} was given up, but {engine.name} holds it")

    # ---- messages ----

    def some(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)

    def _call(
        self,
        name: str,
        life: int,
        serve: Serve,
        reply: Reply,
        work: float = 0.0,
    ) -> None:
        """One call of a member: ``reply`` makes an event of its answer, or of an error."""
        call = _Call(self, self.engines[name], life, serve, reply)
        if self.rng.random() >= self.weather.loss:
            self.later(self.some(self.weather.delay) + work, call.arrive)
        self._time.expire(call, work)

    def _ask(self, action: Ask, life: int) -> None:
        def reply(result: object) -> Event:
            if isinstance(result, Standing):
                standing = result
                return lambda c: c.stood(action.member, action.grant, standing, self.now)
            if isinstance(result, EngineRestarted):
                return lambda c: c.restarted(action.member, action.grant, str(result), self.now)
            return lambda c: c.silent(action.member, str(result), self.now)

        self._call(action.member, life, lambda e: e.grant(action.grant, self.now), reply)

    def _tell(self, action: Tell, life: int) -> None:
        def reply(result: object) -> Event:
            why = "" if result is None else str(result)
            final = isinstance(result, RolloutError)
            return lambda c: c.decided(
                action.decision.update_id, action.member, why, self.now, final=final
            )

        def decide(engine: SimulatedMember) -> None:
            if engine.decide(action.decision):
                if action.decision.update_id not in self.promised:
                    raise Violation(f"{engine.name} committed what no record has")
                self._commit_times.setdefault(action.decision.update_id, []).append(self.now)

        self._call(action.member, life, decide, reply)

    def _check(self, action: Check, life: int) -> None:
        def reply(result: object) -> Event:
            if isinstance(result, tuple):
                version, digest = result
                held = version, digest, self.now, _adapters(digest)
                return lambda c: c.checked(action.member, *held)
            return lambda c: c.silent(action.member, str(result), self.now)

        def held(engine: SimulatedMember) -> tuple[int, int]:
            return engine.version, engine.digest

        self._call(action.member, life, held, reply, work=self.some(0.1))

    def _fill(self, action: Fill, life: int) -> None:
        donor = self.engines[action.donor]

        def fill(engine: SimulatedMember) -> tuple[int, int]:
            engine.fill(donor, action.version)
            return engine.version, engine.digest

        def reply(result: object) -> Event:
            if isinstance(result, tuple):
                version, digest = result
                held = version, digest, self.now, _adapters(digest)
                return lambda c: c.checked(action.member, *held)
            return lambda c: c.unfilled(action.member, str(result), self.now)

        self._call(action.member, life, fill, reply, work=self.some(self.weather.stage))

    # ---- the trainer ----

    def _updates(self, left: int) -> None:
        def again(committed: bool) -> None:
            self.later(self.some(0.2), self._updates, left - 1)

        if self._resting:
            return
        if left and not self.update(again, back=self.rng.random() < ROLLBACKS):
            self.later(0.5, self._updates, left)

    def update(self, then: Callable[[bool], None] = lambda _: None, *, back: bool = False) -> bool:
        """Begin an update, or a rollback where there is one to make; False where none can begin.
        ``then`` hears whether it has committed.
        """
        state, life, update_id = self.coordinator, self.life, f"u{next(self._numbers)}"
        back = back and self.durable.before != 0
        try:
            if state is None or self.faults.stopped(life):
                return False
            names, version = state.begin(update_id, None, self.now, back=back, joins=not back)
        except RolloutError:
            return False
        digest = state.promise.before if back else self.rng.getrandbits(60) | 1
        staged, began = Staged(update_id, version, digest, back), self.now
        self._do(state.commit(update_id, self.now), life)

        def ended(action: Ended) -> None:
            if action.committed:
                self.found.commits += 1
                self.found.rollbacks += back
                self.floor = (self.durable.epoch, version)
                for name in self.engines:  # from now on: at no moment is a breach likelier
                    self.read(name)
                times = self._commit_times.pop(update_id, [self.now])
                self.found.skew.append(max(times) - min(times))
                self.found.total.append(self.now - began)
            else:
                self.found.aborts += 1
            then(action.committed)

        self._outcome = ended
        left, enough = set(names), len(names) - max(self.quorum, len(names) // 2)

        def voted(name: str) -> None:
            left.discard(name)
            if len(left) == enough:
                wait = late_at(began, self.now, self.weather.patience) - self.now
                self.later(wait, self._lose, left, staged.update_id, life)

        for name in names:
            self._part(name, life, staged, state.promise.fence, voted)
        return True

    def _lose(self, late: set[str], update_id: str, life: int) -> None:
        for name in sorted(late):
            self.feed(life, partial(self._late, update_id, name))

    def _late(self, update_id: str, name: str, state: Coordinator) -> list[Action]:
        return state.lost(update_id, name, "it is late", self.now)

    def _part(
        self, name: str, life: int, staged: Staged, fence: int, voted: Callable[[str], None]
    ) -> None:
        def reply(result: object) -> Event:
            if result is None:
                voted(name)
                held = staged.digest, self.now, _adapters(staged.digest)
                return lambda c: c.voted(staged.update_id, name, *held)
            return lambda c: c.lost(staged.update_id, name, str(result), self.now)

        work = self.some(self.weather.delay if staged.back else self.weather.stage)
        self._call(name, life, lambda e: e.vote(staged, fence), reply, work=work)

    # ---- clients ----

    def _read(self) -> None:
        """Somebody asks a member, whichever, as a front that knows nothing would."""
        self.read(self.rng.choice(list(self.engines)))
        self.later(self.some(0.02), self._read)

    def read(self, name: str) -> None:
        """Ask a member; ``Violation`` where what it serves breaks a promise."""
        engine = self.engines[name]
        self.found.reads += 1
        if not engine.serves(self.now):
            self.found.refused += 1
            return
        epoch, floor = self.floor
        if epoch == self.durable.epoch and engine.version < floor:
            raise Violation(
                f"at {self.now:.3f} {engine.name} serves {engine.version}, below the "
                f"{floor} that was answered"
            )
        known = self.contents.get((self.durable.epoch, engine.version))
        if known is not None and known != engine.digest and engine.version >= floor:
            raise Violation(f"{engine.name} serves other contents as {engine.version}")

    # ---- faults ----

    def _engine(self, name: str) -> SimulatedMember:
        rate = 1 + self.rng.uniform(-DRIFT, DRIFT) / 2.1
        return SimulatedMember(name=name, epoch=next(self._epochs), rate=rate)

    def _fault(self, left: int) -> None:
        if not left or not self.fault_rate:
            return
        self.found.faults += 1
        self.faults.draw(self.rng, self.of_all)
        self.later(self.rng.expovariate(self.fault_rate), self._fault, left - 1)

    def replace_engine(self, engine: SimulatedMember, *, told: bool = True) -> None:
        """Another process in the place of one that has ended, with the clock of its host; ``told``:
        who started it says so.
        """
        name = engine.name
        self.engines[name] = SimulatedMember(
            name=name, epoch=next(self._epochs), rate=engine.rate, ahead=engine.ahead
        )
        for life in list(self.coordinators) if told else ():
            self.feed(life, lambda c: c.died(name, self.now))
            self.feed(life, lambda c: c.add(name, self.now))

    def _check_end(self) -> None:
        state = self.coordinator
        if state is None or (state.update and state.update.phase is not Phase.STAGING):
            raise Violation("the fleet did not come to rest")
        idle = [m for m in state.members.values() if m.status is not Status.SERVING]
        if idle:
            raise Violation(f"at rest {idle[0].name} does not serve: {idle[0].why}")
        if self.floor[0] == self.durable.epoch and self.durable.version < self.floor[1]:
            raise Violation(f"version {self.floor[1]} was answered, and is lost")
        for engine in self.engines.values():
            if (engine.version, engine.digest) != (state.promise.version, state.promise.digest):
                raise Violation(f"at rest {engine.name} holds {engine.version}")
            if engine.prepared is not None:
                raise Violation(f"at rest {engine.name} waits for a decision")


class _Call:
    """On its way to a member, and back."""

    __slots__ = ("_engine", "_fleet", "_life", "_reply", "_serve", "answered")

    def __init__(
        self, fleet: Simulation, engine: SimulatedMember, life: int, serve: Serve, reply: Reply
    ) -> None:
        self._fleet, self._engine, self._life = fleet, engine, life
        self._serve, self._reply, self.answered = serve, reply, False

    def arrive(self) -> None:
        engine, fleet = self._engine, self._fleet
        if not engine.up or engine.cut:
            return
        try:
            result = self._serve(engine)
        except RolloutError as error:
            result = error
        if fleet.rng.random() >= fleet.weather.loss and not engine.mute:
            fleet.later(fleet.some(fleet.weather.delay), self._answer, result)

    def _answer(self, result: object) -> None:
        if not self.answered and not self._engine.cut:
            self.answered, self._engine.heard = True, self._fleet.now
            self._fleet.feed(self._life, self._reply(result))

    def expire(self) -> None:
        self.answered = True
        self._fleet.feed(self._life, self._reply(TimeoutError("no answer")))


def _adapters(digest: int) -> Adapters:
    """Those that are held beside weights, all of that digest."""
    return (HeldAdapter("a", digest % 1000, digest),)

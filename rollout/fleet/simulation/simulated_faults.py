"""What may befall a simulated fleet's members, coordinator, network, clocks and disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Protocol

from rollout.fleet.simulation.simulated_member import SimulatedMember

DRAWN = ("crash", "cut", "mute", "stop", "jump", "cut")  # of members, in courses of a seed
SLOW = 40.0  # how many times as long a slow disk takes


class SimulatedFleet(Protocol):
    """What they befall: the ``Simulation``, as far as faults go."""

    life: int  # of the coordinator that has the record

    @property
    def now(self) -> float: ...
    @property
    def engines(self) -> Mapping[str, SimulatedMember]: ...
    @property
    def coordinators(self) -> Container[int]: ...
    def later(self, delay: float, fn: Callable[..., None], *args: object) -> None: ...
    def replace_engine(self, engine: SimulatedMember, *, told: bool = True) -> None: ...
    def begin_life(self) -> None: ...
    def end_life(self, life: int) -> None: ...
    def forget_update(self, why: str) -> None: ...


class Faults:
    """Each begins now, and is over after so many seconds of virtual time."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._stopped: dict[int, float] = {}  # until when, by life of the coordinator
        self._disk_full = self._disk_slow = 0.0  # until when
        self.of_members: dict[str, Callable[[str, float], None]] = {
            "crash": self.crash, "cut": self.cut, "mute": self.mute, "stop": self.stop,
            "jump": self.jump, "leave": self.leave, "restart": self.restart,
        }  # fmt: skip
        self.of_all: dict[str, Callable[[float], None]] = {
            "crash coordinator": self.crash_coordinator, "usurp": self.usurp,
            "stop coordinator": self.stop_coordinator, "fill disk": self.fill_disk,
            "slow disk": self.slow_disk,
        }  # fmt: skip

    def draw(self, rng: random.Random, of_all: float | None = None) -> None:
        """One of them, of random length; see ``Simulation``."""
        kinds = [*DRAWN, *self.of_all]
        if of_all is not None:
            kinds = list(self.of_all if rng.random() < of_all else DRAWN)
        kind, name = rng.choice(kinds), rng.choice(list(self._fleet.engines))
        seconds = rng.uniform(0.1, 20.0 if kind == "crash" else 8.0)
        if kind in self.of_members:
            self.of_members[kind](name, seconds)
        else:
            self.of_all[kind](seconds)

    def end(self) -> None:
        """Of what lasts; who was stopped or has crashed comes back at its time."""
        self._disk_full = self._disk_slow = 0.0
        for engine in self._fleet.engines.values():
            engine.cut = engine.mute = False

    # ---- members ----

    def crash(self, name: str, seconds: float) -> None:
        """A new process comes after so many, with the weights it was first started with."""
        fleet = self._fleet
        engine = fleet.engines[name]
        if engine.up:
            engine.up, engine.dead = False, True
            fleet.later(seconds, fleet.replace_engine, engine)

    def restart(self, name: str, seconds: float) -> None:
        """As ``crash``, and nobody says that it is another process that comes."""
        fleet = self._fleet
        engine = fleet.engines[name]
        if engine.up:
            engine.up, engine.dead = False, True
            fleet.later(seconds, partial(fleet.replace_engine, told=False), engine)

    def leave(self, name: str, seconds: float) -> None:
        """It says that it is about to end, and does so many seconds later; another comes."""
        engine = self._fleet.engines[name]
        if engine.up and not engine.leaving:
            engine.leaving = True
            self._fleet.later(seconds, self._go, engine)

    def _go(self, engine: SimulatedMember) -> None:
        """One that is stopped when its time has come ends once it runs again."""
        if engine.up:
            self.restart(engine.name, 1.0)
        elif not engine.dead:
            self._fleet.later(0.1, self._go, engine)

    def cut(self, name: str, seconds: float) -> None:
        """No message reaches it, or leaves it, for so many seconds."""
        engine = self._fleet.engines[name]
        if not engine.cut:
            engine.cut = True
            self._fleet.later(seconds, lambda: setattr(engine, "cut", False))

    def mute(self, name: str, seconds: float) -> None:
        """It does what it is asked, and no answer of it arrives."""
        engine = self._fleet.engines[name]
        if not engine.mute:
            engine.mute = True
            self._fleet.later(seconds, lambda: setattr(engine, "mute", False))

    def stop(self, name: str, seconds: float) -> None:
        """As by SIGSTOP, and SIGCONT so many seconds later."""
        engine = self._fleet.engines[name]
        if engine.up:
            engine.up = False
            self._fleet.later(seconds, lambda: setattr(engine, "up", not engine.dead))

    def jump(self, name: str, seconds: float) -> None:
        """Its clock goes ahead by so many."""
        self._fleet.engines[name].ahead += seconds

    # ---- the coordinator ----

    def crash_coordinator(self, seconds: float) -> None:
        """Another comes after so many."""
        fleet = self._fleet
        if fleet.life in fleet.coordinators:
            fleet.end_life(fleet.life)
            fleet.forget_update("the coordinator crashed")
            fleet.later(seconds, fleet.begin_life)

    def usurp(self, seconds: float) -> None:
        """Another takes the record at once; the earlier one goes on for so many seconds: it tells,
        fills and writes. Its grants are held back, as in a service they are by the lock of the
        record's file, which nobody else gets while it lives.
        """
        fleet = self._fleet
        if (earlier := fleet.life) in fleet.coordinators and not self.disk_is_full:
            fleet.forget_update("another coordinator has the record")
            fleet.begin_life()
            fleet.later(seconds, fleet.end_life, earlier)

    def stop_coordinator(self, seconds: float) -> None:
        """As by SIGSTOP: what comes meanwhile is heard at SIGCONT."""
        life = self._fleet.life
        self._stopped[life] = max(self._stopped.get(life, 0.0), self._fleet.now + seconds)

    def stopped(self, life: int) -> float:
        """Seconds for which a coordinator is stopped still."""
        return max(0.0, self._stopped.get(life, 0.0) - self._fleet.now)

    # ---- the record's disk ----

    def fill_disk(self, seconds: float) -> None:
        """Nothing can be written for so many seconds."""
        self._disk_full = max(self._disk_full, self._fleet.now + seconds)

    def slow_disk(self, seconds: float) -> None:
        self._disk_slow = max(self._disk_slow, self._fleet.now + seconds)

    @property
    def disk_is_full(self) -> bool:
        return self._fleet.now < self._disk_full

    @property
    def slowness(self) -> float:
        """How many times as long as else a write takes."""
        return SLOW if self._fleet.now < self._disk_slow else 1.0

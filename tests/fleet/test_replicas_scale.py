"""Engines that a front starts: how many there are, and what becomes of those that end."""

import threading

import pytest
from fleet_front import ENGINE, LEASE
from shared_engines import eventually

from rollout import Rollout
from rollout.errors import ConfigError, DeadlineExceeded, WorkerDied
from rollout.fleet.fleet import Fleet
from rollout.fleet.record import Record
from rollout.fleet.replicas import End, Replicas


class Engine:
    """A real engine of this process, whose end is told as a process's would be."""

    token, waits_for = "", ""

    def __init__(self, model):
        self._model, self._told, self._ended = model, threading.Event(), None
        self._rollout = None

    def ready(self):
        self._rollout = Rollout(self._model, **ENGINE)
        return self._rollout.address

    def tell(self, end):
        self._ended = end
        self._told.set()

    def wait(self):
        self._told.wait()
        return self._ended

    def end(self):
        self.tell(self._ended or End(why="it was ended"))
        if self._rollout is not None:
            self._rollout.shutdown()


class NoRoom(Engine):
    """One for which there never is a place."""

    waits_for = "it waits for room"

    def ready(self):
        self._told.wait()
        raise WorkerDied("it was ended while it started")


class Here:
    """Starts them, until there is no ``room``."""

    def __init__(self, model, room=9):
        self.model, self.room, self.launched = model, room, {}

    def launch(self, name):
        full = len(self.launched) >= self.room
        self.launched[name] = NoRoom(self.model) if full else Engine(self.model)
        return self.launched[name]


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(Record(tmp_path / "record", LEASE), lease=LEASE)
    yield fleet
    fleet.close()


def names(fleet):
    return sorted(link.name for link in fleet.serving())


def test_engines_come_and_go_as_it_is_asked(fleet, checkpoint):
    here = Here(checkpoint)
    replicas = Replicas(fleet, here, 1, most=2)
    try:
        replicas.start()
        eventually(lambda: names(fleet) == ["replica-0"])
        replicas.scale(2)
        eventually(lambda: names(fleet) == ["replica-0", "replica-1"])
        # Its machine is about to go: another is there for it, under a name of its own.
        here.launched["replica-0"].tell(End(why="its node is about to leave", notice=0.0))
        eventually(lambda: names(fleet) == ["replica-1", "replica-2"])
        replicas.scale(1)
        eventually(lambda: [row["name"] for row in fleet.members()] == ["replica-1"])
        # It ends by itself: it is started again, as what it was.
        here.launched["replica-1"].tell(End(why="its process has ended with status -9"))
        eventually(lambda: "status -9" in fleet.members()[0]["why"])
        eventually(lambda: names(fleet) == ["replica-1"])
        for count in (0, 3):
            with pytest.raises(ConfigError, match="may have 1 to 2"):
                replicas.scale(count)
    finally:
        replicas.close()


def test_a_fleet_begins_with_those_that_found_a_place(fleet, checkpoint):
    replicas = Replicas(fleet, Here(checkpoint, room=1), 2, enough=1)
    try:
        replicas.start()
        eventually(lambda: names(fleet) == ["replica-0"])
        assert replicas.starting() == {"replica-1": "it waits for room"}
        replicas.scale(1)  # who has no place yet is given up first
        assert replicas.starting() == {}
        assert names(fleet) == ["replica-0"]
    finally:
        replicas.close()


def test_too_little_room_is_said_at_the_deadline(fleet, checkpoint):
    replicas = Replicas(fleet, Here(checkpoint, room=0), 2, start_timeout=0.1)
    with pytest.raises(DeadlineExceeded, match=r"0 of 2 .* replica-1: it waits for room"):
        replicas.start()


def test_a_failure_at_the_start_is_its_own_error(fleet, tmp_path):
    with pytest.raises(ConfigError, match="no directory here and no hub id"):
        Replicas(fleet, Here(str(tmp_path / "none")), 1).start()

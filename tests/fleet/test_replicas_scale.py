"""Engines that a front starts: how many there are, and what becomes of those that end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fleet_front import ENGINE, LEASE
from shared_engines import eventually

from rollout import AsyncRollout, Rollout
from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed, WorkerDied
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.backend import FleetBackend
from rollout.fleet.launching.replicas import End, Replicas
from rollout.server.http.app import build_app


class Engine:
    """A real engine of this process, whose end is told as a process's would be."""

    token, waits_for, http, pid = "", "", "127.0.0.1:1", 7

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


def test_numbers_that_do_not_fit_are_named_by_their_flags(fleet, checkpoint):
    for least, count, most in ((3, 2, 2), (1, 3, 2), (0, 1, 1)):
        named = f"--replicas {count} is not between --min-replicas {least} .* {most}, of which"
        with pytest.raises(ConfigError, match=named):
            Replicas(fleet, Here(checkpoint), count, least=least, most=most)


def test_engines_come_and_go_as_it_is_asked(fleet, checkpoint):
    here = Here(checkpoint)
    replicas = Replicas(fleet, here, 1, most=2)
    try:
        replicas.start()
        eventually(lambda: names(fleet) == ["replica-0"])
        [row], [link] = fleet.members(), fleet.links()
        assert (row["address"], row["http"], row["pid"]) == (link.client.address, "127.0.0.1:1", 7)
        replicas.scale(2)
        eventually(lambda: names(fleet) == ["replica-0", "replica-1"])
        # Its machine is about to go: another is there for it, under a name of its own.
        here.launched["replica-0"].tell(End(why="its node is about to leave", notice=0.0))
        eventually(lambda: names(fleet) == ["replica-1", "replica-2"])
        replicas.scale(1)
        eventually(lambda: [row["name"] for row in fleet.members()] == ["replica-1"])
        # It ends by itself: it is started again, as what it was.
        here.launched["replica-1"].tell(End(why="its process has ended with status -9"))
        eventually(lambda: "status -9" in (row := fleet.members()[0])["why"] and not row["pid"])
        eventually(lambda: names(fleet) == ["replica-1"])
        for count in (0, 3):
            with pytest.raises(ConfigError, match="may have 1 to 2"):
                replicas.scale(count)
    finally:
        replicas.close()


def test_those_that_run_already_come_first_and_keep_their_names(fleet):
    here = Here(None, room=0)
    replicas = Replicas(fleet, here, 2, most=4, enough=1, found=["replica-1", "replica-4"])
    assert replicas.count == 0
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(replicas.start)
        eventually(lambda: sorted(here.launched) == ["replica-1", "replica-4"])
        replicas.scale(3)
        eventually(lambda: sorted(here.launched) == ["replica-1", "replica-4", "replica-5"])
        replicas.close()
        with pytest.raises(EngineClosed):
            started.result(60)


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


def test_one_that_has_ended_and_finds_no_place_again_is_no_member_once_fewer_will_do(
    fleet, checkpoint
):
    here = Here(checkpoint, room=2)
    replicas = Replicas(fleet, here, 2)
    try:
        replicas.start()
        here.launched["replica-1"].tell(End(why="its process has ended"))
        eventually(lambda: replicas.starting() == {"replica-1": "it waits for room"}, 30)
        replicas.scale(1)
        eventually(lambda: [row["name"] for row in fleet.members()] == ["replica-0"])
    finally:
        replicas.close()


def test_too_little_room_is_said_at_the_deadline(fleet, checkpoint):
    replicas = Replicas(fleet, Here(checkpoint, room=0), 2, start_timeout=0.1)
    with pytest.raises(DeadlineExceeded, match=r"0 of 2 .* replica-1: it waits for room"):
        replicas.start()


def test_a_failure_at_the_start_is_its_own_error(fleet, tmp_path):
    with pytest.raises(ConfigError, match="no directory here and no hub id"):
        Replicas(fleet, Here(str(tmp_path / "none")), 1).start()


def test_what_is_live_outlasts_the_one_engine_that_has_it(fleet, checkpoint, trained):
    here = Here(checkpoint)
    replicas = Replicas(fleet, here, 1, most=2)
    with Rollout.over(lambda: AsyncRollout.over(FleetBackend(fleet, replicas=replicas))) as front:
        try:
            live = front.update_weights(trained)
            # Its successor loads the checkpoint first: until it has the copy, nobody else does.
            here.launched["replica-0"].tell(End(why="its node is about to leave", notice=120.0))
            eventually(lambda: [row["name"] for row in fleet.members()] == ["replica-1"], 60)
            assert names(fleet) == ["replica-1"]
            assert (fleet.epoch, fleet.version) == (live.epoch, live.version)
            # So it is with fewer of them, whoever is the one that goes.
            replicas.scale(2)
            eventually(lambda: "replica-2" in [row["name"] for row in fleet.members()], 60)
            fleet.leave("replica-1", 0.0)
            assert names(fleet) == ["replica-2"]
            assert (fleet.epoch, fleet.version) == (live.epoch, live.version)
            assert front.check_weights(trained).equal
        finally:
            replicas.close()


def test_a_fleet_that_starts_may_be_told_that_fewer_will_do(fleet, checkpoint):
    replicas = Replicas(fleet, Here(checkpoint, room=1), 2)
    try:
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(replicas.start)
            eventually(lambda: replicas.starting() == {"replica-1": "it waits for room"}, 30)
            replicas.scale(1)
            starting.result(60)
        eventually(lambda: names(fleet) == ["replica-0"])
    finally:
        replicas.close()


def test_over_http_replicas_scale_and_one_that_is_let_go_is_replaced(fleet, checkpoint):
    replicas = Replicas(fleet, Here(checkpoint), 1, most=2)

    async def until(http, expected):
        while True:
            rows = (await http.get("/fleet/members")).json()["members"]
            if {row["name"] for row in rows if row["status"] == "serving"} == expected:
                return
            await asyncio.sleep(0.02)

    async def course():
        # What waits for a member has threads of its own.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        rollout = AsyncRollout.over(FleetBackend(fleet, replicas=replicas))
        try:
            await rollout.start()
            transport = httpx.ASGITransport(build_app(rollout))
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
                reply = await http.post("/fleet/replicas", json={"count": 2})
                assert reply.json()["count"] == 2
                await until(http, {"replica-0", "replica-1"})
                longest = rollout.stream([1, 2], {"max_tokens": 250, "ignore_eos": True})
                await anext(longest)
                [busy] = [link.name for link in fleet.links() if link.calls]
                query = {"name": busy, "notice": 30}
                leaving = asyncio.create_task(http.delete("/fleet/members", params=query))
                while next(row for row in fleet.members() if row["name"] == busy)["why"] == "":
                    await asyncio.sleep(0.01)
                assert (await http.get("/weight_info")).status_code == 200
                assert not leaving.done()
                await longest.aclose()
                assert (await leaving).status_code == 200
                await until(http, {"replica-0", "replica-1", "replica-2"} - {busy})
                assert (await http.get("/fleet/replicas")).json()["count"] == 2
                body = {"address": "127.0.0.1:1", "name": "replica-7"}
                reply = await http.post("/fleet/members", json=body)
                assert reply.status_code == 400
                assert "a name of engines that this front starts" in reply.text
                reply = await http.post("/fleet/replicas", json={"count": 3})
                assert "may have 1 to 2" in reply.text
        finally:
            await rollout.shutdown()

    try:
        asyncio.run(asyncio.wait_for(course(), 120))
    finally:
        replicas.close()

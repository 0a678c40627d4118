"""How a front begins: with the members that are there, and what it says of the others."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from fleet_front import LEASE, Front
from shared_engines import eventually

from rollout import AsyncRollout
from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.backend import FleetBackend
from rollout.server.http.app import build_app

NOBODY = "127.0.0.1:1"  # a port that needs root
GREEDY = {"max_tokens": 3, "temperature": 0.0}


@contextmanager
def web_server():
    """Where HTTP is spoken, and gRPC is not."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    with server.accept()[0] as client:
                        client.recv(4096)
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def row_of(fleet, name):
    return next(row for row in fleet.members() if row["name"] == name)


def test_a_front_serves_as_soon_as_its_quorum_does_and_names_who_does_not_answer(
    engines, tmp_path, caplog
):
    front = Front(tmp_path / "record", engines[:2])
    fleet = front.fleet
    try:
        fleet.add(NOBODY)
        twin = engines[0].address.replace("127.0.0.1", "localhost")
        fleet.add(twin)
        assert front.rollout.generate([[1, 2]], GREEDY)[0].finished
        assert {link.name for link in fleet.serving()} == set(front.names)
        assert "nothing listens there" in row_of(fleet, NOBODY)["why"]
        eventually(lambda: "the same engine as member" in row_of(fleet, twin)["why"], 10)
        eventually(lambda: f"member {NOBODY} does not serve: the rollout" in caplog.text, 10)
        for address in (engines[0].address, twin):
            with pytest.raises(ConfigError, match=f"is member '{front.names[0]}' of this fleet"):
                fleet.add(address, ask=True)
        fleet.remove(twin)
        fleet.add(engines[2].address, name=NOBODY)  # in its place
        fleet.wait_serving(3, 30.0)
        eventually(lambda: f"member {NOBODY} serves version 0" in caplog.text, 10)
        assert row_of(fleet, front.names[0])["status"] == "serving"
    finally:
        front.close()


def test_a_quorum_of_more_engines_than_there_are_is_warned_of(engines, tmp_path, caplog):
    front = Front(tmp_path / "record", engines[:1], quorum=2)
    try:
        assert front.rollout.generate([[1, 2]], GREEDY)[0].finished
        assert "no update can commit: the fleet has 1 engines, and --quorum is 2; a" in caplog.text
    finally:
        front.close()


def refused(engine):
    try:
        engine.generate([[1, 2]], GREEDY)
    except EngineClosed as error:
        return "its lease has run out" in str(error)
    return False


def test_engines_of_a_front_that_never_began_serve_alone_again_as_before(engines, tmp_path, caplog):
    engine = engines[0]

    def never_begins(name):
        """Fenced or not, the engine is a member until the front gives up."""
        fleet = Fleet(Record(tmp_path / name, 1.0), lease=1.0)
        rollout = AsyncRollout.over(FleetBackend(fleet, start_timeout=2.0))
        fleet.add(NOBODY)
        fleet.add(engine.address)

        async def course():
            with pytest.raises(DeadlineExceeded, match="do so again in 1 s"):
                await rollout.start()
            await rollout.shutdown()

        eventually(lambda: row_of(fleet, engine.address)["state"] is not None, 30)
        asyncio.run(course())

    never_begins("first")
    assert engine._async.backend.core.serving.left is not None
    said = "never began: the engine serves alone again"
    eventually(lambda: not refused(engine) and said in caplog.text, 30)
    assert engine._async.backend.core.serving.left is None

    front = Front(tmp_path / "began", [engine], lease=1.0)
    try:
        assert front.rollout.generate([[1, 2]], GREEDY)[0].finished
    finally:
        front.close()
    eventually(lambda: refused(engine), 30)
    never_begins("second")  # it was no engine that served alone
    time.sleep(2.5)
    assert refused(engine)


def test_below_its_quorum_a_front_says_so_and_ends_at_its_deadline(tmp_path):
    async def course(web):
        fleet = Fleet(Record(tmp_path / "record", LEASE), lease=LEASE)
        rollout = AsyncRollout.over(FleetBackend(fleet, start_timeout=1.5))
        fleet.add(NOBODY)
        transport = httpx.ASGITransport(build_app(rollout))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
                starting = asyncio.create_task(rollout.start())
                reply = await http.get("/v1/models")
                assert reply.status_code == 503
                said = "0 of the fleet's 1 engines serve, and 1 are needed to begin: " + NOBODY
                assert said in reply.text
                assert "start those that are missing, or the front with a lower --q" in reply.text
                [row] = (await http.get("/fleet/members")).json()["members"]
                assert (row["name"], row["status"]) == (NOBODY, "joining")
                for address, why in (
                    ("http://127.0.0.1:50051", "is not host:port"),
                    ("127.0.0.1", "is not host:port"),
                    ("127.0.0.1:65536", "is not host:port"),
                    (NOBODY, "name each engine once"),
                    (web, f"cannot talk to {web}: it is an HTTP port; give the gRPC port"),
                ):
                    reply = await http.post("/fleet/members", json={"address": address})
                    assert reply.status_code == 400, reply.text
                    assert why in reply.text
                reply = await http.post("/fleet/members", json={"address": "nobody.invalid:5"})
                assert len(reply.json()["members"]) == 2  # it may come up later
                with pytest.raises(
                    DeadlineExceeded, match="0 of the fleet's 2 engines serve, and"
                ) as e:
                    await starting
                return str(e.value)
        finally:
            await rollout.shutdown()

    with web_server() as web:
        said = asyncio.run(course(web))
    assert "2 are needed to begin after 1.5 s" in said
    assert "127.0.0.1:1: the rollout service at 127.0.0.1:1 does not answer" in said
    assert "nobody.invalid:5: " in said

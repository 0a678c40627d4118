"""A front reaches its members over TLS, and members each other: with certificates on both sides."""

import asyncio
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from certificates import make_certificates
from fleet_front import LEASE, Front
from shared_engines import eventually

from rollout.errors import ConfigError
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.server.grpc.server import serve

GREEDY = {"max_tokens": 3, "temperature": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@contextmanager
def doors(engines, tls):
    """Addresses of these engines where they speak TLS."""
    servers = []
    try:
        for engine in engines:
            loop = engine._loop._loop
            serving = asyncio.run_coroutine_threadsafe(serve(engine._async, tls=tls), loop)
            servers.append((loop, serving.result(30)))
        yield [server.address for _, server in servers]
    finally:
        for loop, server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)


def test_updates_calls_and_joins_of_a_fleet_go_over_mutual_tls(engines, tmp_path, made, trained):
    ours = {"cert": made("ours.pem"), "key": made("ours.key")}
    client = ClientTls(ca=made("ours-ca.pem"), **ours)
    for number, engine in enumerate(engines):
        engine._async.backend._coordinator._host = f"host {number}"  # as it will say
    with doors(engines, ServerTls(client_ca=made("ours-ca.pem"), **ours)) as addresses:
        first = [SimpleNamespace(address=address) for address in addresses[:2]]
        front = Front(tmp_path / "record", first, tls=client)
        fleet = front.fleet
        try:
            receipt = front.rollout.update_weights(trained, transport="inline")
            assert set(receipt.details["members"].values()) == {"committed"}
            fleet.add(addresses[2].replace("127.0.0.1", "localhost"), ask=True)
            fleet.wait_serving(3, 60.0)  # sent by a member, which showed its own certificate
            assert [engine.weight_version for engine in engines] == [1, 1, 1]
            receipt = front.rollout.update_weights(trained, transport="inline")
            names = [link.name for link in fleet.links()]  # each takes the bytes on to the next
            fed = dict(zip(names, ["the front", *names], strict=False))
            assert receipt.details["members_fed_by"] == fed
            assert front.rollout.check_weights(trained).equal
            assert front.rollout.generate([[1, 2]], GREEDY)[0].finished
        finally:
            front.close()
        time.sleep(1.2 * LEASE)  # until nobody serves by the leases of that front
        for name, tls, why in (
            ("plain", None, "it speaks TLS: pass --engine-tls-ca"),
            ("theirs", ClientTls(ca=made("theirs-ca.pem"), **ours), "certificate is not trusted"),
            ("nobody", ClientTls(ca=made("ours-ca.pem")), "refuses our certificate, or misses one"),
            ("name", ClientTls(ca=made("ours-ca.pem"), **ours, server_name="other"), "not trusted"),
        ):
            with closing(Fleet(Record(tmp_path / name, LEASE), lease=LEASE, tls=tls)) as fleet:
                with pytest.raises(ConfigError, match=why):
                    fleet.add(addresses[0], ask=True)
                fleet.add(addresses[0])
                eventually(lambda why=why, fleet=fleet: why in fleet.whys(), 20)
                if name == "name":
                    fleet.add(addresses[1], tls_server_name="localhost", ask=True)
                if name == "plain":
                    with pytest.raises(ConfigError, match="over TLS"):
                        fleet.add(addresses[1], tls_server_name="localhost")

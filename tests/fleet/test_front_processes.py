"""Several fronts as processes of their own: tokens, TLS, and the ends of each of them."""

import contextlib
import json
import re
import socket
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from certificates import make_certificates
from fleet_front import OneMore, break_off, fleet_process
from shared_engines import eventually
from test_processes import members, wait_serving

from rollout import Rollout
from rollout.errors import EngineClosed, RolloutError
from rollout.rpc.tls import ClientTls

pytestmark = pytest.mark.more
GREEDY = {"max_tokens": 6, "temperature": 0.0}
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, n] for n in range(12)]
WAIT = 90.0  # seconds: for hangs


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def completed(http):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://{http}/v1/completions", json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


def serves(client):
    with contextlib.suppress(RolloutError):
        return client.generate(PROMPTS, GREEDY)


def refusal(client):
    """What is said once nobody may serve any more."""
    while True:
        try:
            client.generate(PROMPTS, GREEDY)
        except EngineClosed as error:
            return str(error)


def test_fronts_come_and_go_and_their_clients_have_one_fleet(engines, trained, tmp_path):
    made = make_certificates(tmp_path)
    for engine in engines[:2]:  # the coordinating front tells others of their token
        engine._loop.run(engine._async.serve(control_token="of-engines"))
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    one_more = ["--coordinator", f"127.0.0.1:{port}", "--coordinator-token", "of-fleet"]
    one_more += ["--coordinator-tls-ca", made("ours-ca.pem")]
    with contextlib.ExitStack() as stack:

        def coordinating():
            flags = [word for one in engines[:2] for word in ("--engine", one.address)]
            flags += ["--record", str(tmp_path / "record"), "--engine-token", "of-engines"]
            flags += ["--token", "of-clients", "--control-token", "of-fleet"]
            flags += ["--tls-cert", made("ours.pem"), "--tls-key", made("ours.key")]
            return fleet_process(*flags, grpc_port=port)

        first = stack.enter_context(coordinating())
        routing = stack.enter_context(fleet_process(*one_more))
        another = OneMore(f"127.0.0.1:{port}", "of-fleet", ClientTls(ca=made("ours-ca.pem")))
        stack.callback(another.close)
        clients = [another.rollout, stack.enter_context(Rollout.connect(routing.grpc))]
        wait_serving(routing.http, 2)
        assert completed(routing.http) == 4
        receipt = clients[0].update_weights(trained)
        assert set(receipt.details["members"].values()) == {"committed"}
        expected = tokens(clients[1].generate(PROMPTS, {**GREEDY, "min_version": 1}))
        with pytest.raises(urllib.error.HTTPError) as refused:
            members(routing.http, "POST", {"address": "127.0.0.1:1"})
        assert "routes only" in refused.value.read().decode()

        first.process.kill()
        first.process.wait(10)
        # Calls that were under way are told of their members' leases.
        silent = "the coordinating front .* has not answered"
        eventually(lambda: re.search(silent, refusal(clients[1])), WAIT)
        stack.enter_context(coordinating())
        eventually(lambda: all(map(serves, clients)), WAIT)
        assert [tokens(client.generate(PROMPTS, GREEDY)) for client in clients] == [expected] * 2

        wait_serving(routing.http, 2)
        whole = tokens(clients[1].generate(PROMPTS[:1], LONG))
        with closing(clients[1].stream(PROMPTS[0], LONG)) as stream:
            last = next(stream)
            running = [engine for engine in engines[:2] if engine.metrics().running]
            [break_off(engine) for engine in running[:1]]  # none where it has ended already
            for last in stream:  # noqa: B007
                pass
        assert [last.outputs[0].token_ids] == whole
        routing.process.kill()
        routing.process.wait(10)
        assert tokens(clients[0].generate(PROMPTS, GREEDY)) == expected  # through the other one

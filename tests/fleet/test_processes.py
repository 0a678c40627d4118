"""``rollout serve --replicas`` and ``rollout fleet`` as processes, and the routes of members."""

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from adapted_models import adapted, shaken
from fleet_front import front_process
from serving import alive, descendants, serve
from shared_engines import eventually, standing_still

from rollout import Rollout, SamplingParams
from rollout.errors import RolloutError, TransferFailed
from rollout.rpc.http_port import GRPC_PORT

pytestmark = pytest.mark.more
GREEDY = {"max_tokens": 6, "temperature": 0.0}
PROMPTS = [[5, 6, 7, n] for n in range(12)]
LONG = [{"max_tokens": 200, "temperature": 1.0, "seed": n, "ignore_eos": True} for n in range(4)]
FLAGS = ("--num-kv-blocks", "64", "--max-model-len", "256")


def members(address, method="GET", body=None, query=""):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{address}/fleet/members{query}", data, method=method,
        headers={"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["members"]


def wait_serving(address, count, seconds=90.0):
    deadline = time.monotonic() + seconds
    while sum(row["status"] == "serving" for row in members(address)) != count:
        assert time.monotonic() < deadline, members(address)
        time.sleep(0.1)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_replicas_behind_one_address_survive_a_kill(checkpoint, trained, oracle):
    """Streams that run then go on with the bits that they would have had."""
    with serve(checkpoint, "--replicas", "2", "--deterministic", *FLAGS, forked=False) as served:
        processes = descendants(served.process.pid)
        with Rollout.connect(served.grpc) as client, ThreadPoolExecutor(len(LONG)) as pool:
            rows = members(served.http)
            assert {row["pid"] for row in rows} <= processes
            for row in rows:
                with urllib.request.urlopen(f"http://{row['http']}/health", timeout=30) as reply:
                    assert reply.headers[GRPC_PORT] == row["address"].partition(":")[2]
            assert client.update_weights(trained).version == 1
            expected = tokens(oracle.generate(PROMPTS, GREEDY))
            assert tokens(client.generate(PROMPTS, GREEDY)) == expected
            undisturbed = client.generate(PROMPTS[: len(LONG)], LONG)

            def begin():
                streams = list(map(client.stream, PROMPTS, LONG))  # over both replicas
                [next(stream) for stream in streams]
                return streams

            streams = standing_still(begin, client, len(LONG))
            os.kill(rows[0]["pid"], signal.SIGKILL)
            eventually(lambda: resumed(client))  # once the front knows that it is gone
            ends = pool.map(lambda stream: list(stream)[-1], streams)
            for got, want in zip(ends, undisturbed, strict=True):
                got, want = got.outputs[0], want.outputs[0]
                assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
            assert tokens(client.generate(PROMPTS, GREEDY)) == expected
            eventually(lambda: descendants(served.process.pid) - processes)  # it is started again
            wait_serving(served.http, 2)
            assert tokens(client.generate(PROMPTS, GREEDY)) == expected
            receipt = client.update_weights(trained)
            assert set(receipt.details["members"].values()) == {"committed"}
        processes |= descendants(served.process.pid)
    eventually(lambda: not any(map(alive, processes)))  # no replica outlives its front


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_a_replica_that_was_killed_comes_back_with_the_adapters(checkpoint):
    model = adapted(Path(checkpoint), 1)
    flags = (*FLAGS, "--max-adapters", "3", "--max-lora-rank", "4")
    with serve(checkpoint, "--replicas", "2", *flags) as served:
        processes = descendants(served.process.pid)
        with Rollout.connect(served.grpc) as client:
            client.update_weights(model, adapters={"math": model})
            live = client.update_weights(adapters={"code": shaken(model, 2)})
            asked = [SamplingParams(adapter=name, **GREEDY) for name in ("math", "code")] * 6
            expected = tokens(client.generate(PROMPTS, asked))
            os.kill(members(served.http)[0]["pid"], signal.SIGKILL)
            assert tokens(client.generate(PROMPTS, asked)) == expected
            eventually(lambda: descendants(served.process.pid) - processes)  # it is started again
            wait_serving(served.http, 2)
            assert client.weight_info().adapters == {"math": 1, "code": live.version}
            assert tokens(client.generate(PROMPTS, asked)) == expected
            receipt = client.update_weights(adapters={"math": model})
            assert set(receipt.details["members"].values()) == {"committed"}


def test_a_stopped_engine_serves_nobody_and_catches_up(checkpoint, trained, tmp_path):
    with serve(checkpoint, *FLAGS) as one, serve(checkpoint, *FLAGS) as two:
        record = tmp_path / "record"
        with (
            front_process(record, one.grpc, two.grpc, forked=False) as front,
            Rollout.connect(front.grpc) as client,
        ):
            client.update_weights(trained)
            two.process.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            try:
                with pytest.raises(RolloutError, match=r"a commit needs 2|1 of 2|does not answer"):
                    client.update_weights(trained, timeout=3)
                assert time.monotonic() - begun < 20
            finally:
                two.process.send_signal(signal.SIGCONT)
            wait_serving(front.http, 2)
            assert client.update_weights(trained).version >= 2
            why = r"aborted: 1 of 2 votes needed: member .* not heard of .* version \d+ serves on"
            try:
                with pytest.raises(TransferFailed, match=why):
                    client.update_weights(stopping(two.process, trained.state_dict()), timeout=60)
            finally:
                two.process.send_signal(signal.SIGCONT)
            wait_serving(front.http, 2)
            with serve(checkpoint, *FLAGS) as three:
                members(front.http, "POST", {"address": three.grpc, "name": "third"})
                wait_serving(front.http, 3)
                assert "third" in client.update_weights(trained).details["members"]
                begun = time.monotonic()
                receipt = client.update_weights(
                    stopping(three.process, trained.state_dict()), timeout=60
                )
                assert time.monotonic() - begun < 20
                told = receipt.details["members"]
                assert "it was not heard of" in told.pop("third")
                assert set(told.values()) == {"committed"}
                three.process.send_signal(signal.SIGCONT)
                wait_serving(front.http, 3)
                members(front.http, "DELETE", query="?name=third")
            with pytest.raises(urllib.error.HTTPError):
                members(front.http, "DELETE", query="?name=third")


def test_what_hangs_at_a_stopped_engine_is_asked_of_another(checkpoint, trained, tmp_path):
    """Whichever is asked first: the front goes on once the lease of the one that hangs is over."""
    with serve(checkpoint, *FLAGS) as one, serve(checkpoint, *FLAGS) as two:
        flags = ("--quorum", "1")
        with (
            front_process(tmp_path / "record", one.grpc, two.grpc, flags=flags) as front,
            Rollout.connect(front.grpc, timeout=60) as client,
        ):

            def tokenize():
                assert post(front.http, "/tokenize", {"prompt": "a"})["tokens"]

            def update():
                client.update_weights(trained, timeout=60)

            for verb, engine in product((tokenize, update), (one, two)):
                wait_serving(front.http, 2)
                engine.process.send_signal(signal.SIGSTOP)
                begun = time.monotonic()
                try:
                    verb()
                    taken = time.monotonic() - begun
                finally:
                    engine.process.send_signal(signal.SIGCONT)
                # Of the 30 s for which the front waits for an answer.
                assert taken < 12, (verb.__name__, taken)


def post(address, path, body):
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def resumed(client):
    with contextlib.suppress(RolloutError):
        client.resume_generation()
        return True


def stopping(process, weights):
    """``weights``, in whose middle the process is stopped."""
    for number, item in enumerate(weights.items()):
        if number == len(weights) // 2:
            process.send_signal(signal.SIGSTOP)
        yield item

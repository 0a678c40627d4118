"""Sends every server, and every reader of messages, what nobody should send; nothing may break.

    python benchmarks/fuzz.py [--seconds 600] [--seed 0]

Starts ``rollout serve`` with a tiny made-up checkpoint and draws from ``fuzz_messages.py``: every
method of the gRPC services, every HTTP route, the frames of rank processes, the headers of the
transports, and what a client reads of a server. Each answer is right or a named error of the
caller's: never a 500, INTERNAL or UNKNOWN, never a hang or the end of a process. After every round
a reference request gets the tokens that it got at first. Prints one JSON object; status 1 where it
has violations, with the seeds that find them again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fuzz_messages as made
import grpc
import httpx
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from serving import serve
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.errors import RolloutError, UpdateInProgress
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import output_from_proto, stats_from_json
from rollout.rpc.services import ControlStub, WeightSyncStub
from rollout.rpc.status import error_from_rpc, is_typed
from rollout.weight_sync.protocol.bucket import check_header, check_size, unpack
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.wire import frames
from rollout.wire.codec import from_json, from_plain, parsed, to_plain

LIMIT = 20.0  # seconds in which everything is answered
HELD = 90.0  # seconds after which no update is held any more
HTTP = 8  # turns of the HTTP routes in one round
EXAMPLES = 12  # of one target in one round
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
FLAGS = ("--dtype", "float32", "--max-model-len", "64", "--num-kv-blocks", "128", "--timeout", "10")
Target = tuple[st.SearchStrategy[Any], Callable[[Any], None]]


class Servers:
    """Both servers of one process, and its state as it was at first."""

    def __init__(
        self, http: str, address: str, weights: Mapping[str, Any], token: str | None = None
    ):
        header = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=f"http://{http}", headers=header, timeout=LIMIT)
        self.channel = grpc.insecure_channel(address)
        self.metadata = tuple(header.items())
        self.engine = Rollout.connect(address, token, timeout=LIMIT)
        self.weights = weights
        self.tokens = self._generate()
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self.engine.shutdown()
        self.channel.close()
        self.http.close()

    def check(self) -> None:
        """The reference request gets its tokens; what the messages rightly did is undone first."""
        self.http.post("/abort_weight_update")
        self.restore()
        assert self._generate() == self.tokens, "the reference request got other tokens"

    def restore(self) -> None:
        state = self.engine.metrics().state
        if state == "running":
            return
        self.counts[state] += 1
        with contextlib.suppress(RolloutError):
            self.engine.resume_generation()
            self.engine.wake_up()
        end = time.monotonic() + HELD
        while self.engine.metrics().state == "broken":
            self.http.post("/abort_weight_update")
            with contextlib.suppress(UpdateInProgress):  # held for a client that will not come back
                self.engine.update_weights(dict(self.weights))
            assert time.monotonic() < end, "an update is held for ever"
        assert self.engine.metrics().state == "running"

    def send_http(self, call: tuple[str, str, dict[str, str], str, bytes]) -> None:
        method, path, query, kind, body = call
        headers = {"content-type": kind} if kind else {}
        reply = self.http.request(method, path, params=query, content=body, headers=headers)
        self.counts[f"http {reply.status_code}"] += 1
        assert reply.status_code != 500, reply.text
        if reply.status_code >= 400 and method != "HEAD" and path not in ("/health", "/live"):
            error = reply.json()["error"]
            assert error["type"], error
            assert error["message"], error
        elif method != "HEAD" and reply.headers.get("content-type") == "application/json":
            json.loads(reply.text, parse_constant=_no_constant)
        if path in made.QUERIES or "weight" in path:
            self.restore()

    def send_grpc(self, name: str, messages: list[bytes]) -> None:
        call = self.channel.stream_stream(f"/rollout.v1.{name}")(
            iter(messages), timeout=LIMIT, metadata=self.metadata
        )
        with contextlib.suppress(grpc.RpcError):
            list(call)
        code = call.code()
        if code is not grpc.StatusCode.OK:
            assert code not in NEVER, call.details()
            assert is_typed(call), (code, call.details())
            assert isinstance(error_from_rpc(call, "x"), RolloutError)
        self.counts[f"grpc {code.name}"] += 1
        if name.startswith("Control/"):
            self.restore()

    def _generate(self) -> list[list[int]]:
        outputs = self.engine.generate([[5, 6, 7], [8, 9]], GREEDY)
        return [output.outputs[0].token_ids for output in outputs]


def targets(servers: Servers) -> dict[str, Target]:
    """Everything that reads a message, by name."""

    def call(name: str) -> Callable[[list[bytes]], None]:
        return lambda messages: servers.send_grpc(name, messages)

    found: dict[str, Target] = {
        f"http {number}": (made.http_calls(), servers.send_http) for number in range(HTTP)
    }
    for name, strategy in made.grpc_calls().items():
        found[name] = (strategy, call(name))
    return {**found, **readers(servers)}


def readers(servers: Servers) -> dict[str, Target]:
    """What is read without a server between: by clients, by ranks, by transports."""
    info = WeightSyncStub(servers.channel).Info(pb.WeightInfoRequest(), metadata=servers.metadata)
    stats = ControlStub(servers.channel).Stats(pb.StatsRequest(), metadata=servers.metadata)
    receipt = to_plain(servers.engine.update_weights(dict(servers.weights)))
    output = servers.engine.generate([[5, 6]], GREEDY)[0]

    def named(read: Callable[[Any], Any]) -> Callable[[Any], None]:
        def run(message: Any) -> None:
            with contextlib.suppress(RolloutError):
                read(message)

        return run

    def header(data: bytes) -> None:
        parsed = from_json(BucketHeader, data)
        check_header(parsed)
        check_size(parsed, 1 << 20)
        list(unpack(parsed, torch.zeros(16, dtype=torch.uint8), sparse=True))

    def form(parse: Callable[[Any], Any]) -> Callable[[bytes], None]:
        return named(lambda data: parse(parsed(data)))

    docs = made.documents
    begun = {
        "update_id": "u", "epoch": 1, "base_version": 0, "version": 1, "layout": "", "wants": None
    }  # fmt: skip
    rows = {"id": 1, "tensors": {"a": ["float32", [2], 0, 8], "b": ["int8", [3], 8, 3]}}
    outputs = [_proto(output).SerializeToString()]
    return {
        "bucket header": (docs(made.HEADER), named(header)),
        "update request": (docs(made.REQUEST), form(UpdateRequest.read)),
        "seal": (docs(made.SEAL), form(partial(from_plain, Seal))),
        "begun": (docs(begun), form(partial(from_plain, Begun))),
        "receipt": (docs(receipt), form(partial(from_plain, UpdateReceipt))),
        "weight info": (docs(json.loads(info.json)), form(partial(from_plain, WeightInfo))),
        "options": (docs(made.OPTIONS), form(UpdateOptions.on_server)),
        "stats": (docs(json.loads(stats.json)), named(stats_from_json)),
        "output": (st.sampled_from(outputs).flatmap(made.changed), named(_read_output)),
        "frame": (
            st.tuples(docs(rows), st.binary(max_size=16)),
            named(lambda f: frames.decode(f[0], bytearray(f[1]))),
        ),
        "rank pipe": (
            st.tuples(docs(rows), st.integers(0, 64), st.integers(-8, 8), st.binary(max_size=64)),
            named(lambda f: _through_a_pipe(*f)),
        ),
    }


def _proto(output: Any) -> Any:
    from rollout.rpc.convert import output_to_proto

    return output_to_proto(output)


def _read_output(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    with contextlib.suppress(DecodeError):  # grpc's own, which ends the call
        output_from_proto(pb.RequestOutput.FromString(data))


def _through_a_pipe(head: bytes, payload: int, off: int, rest: bytes) -> None:
    """A frame whose announced sizes may be wrong, as a rank or its engine reads it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(LIMIT)
        prefix = struct.pack(frames._PREFIX.format, max(0, len(head) + off), payload)
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            ours.send(prefix + head + rest)
        ours.close()
        while frames.recv_frame(theirs) is not None:
            pass


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def run(servers: Servers, seconds: float, start: int) -> dict[str, Any]:
    """Rounds over all targets until the time is over; a target that fails is not tried again."""
    every, end, rounds, sent = targets(servers), time.monotonic() + seconds, 0, 0
    violations: list[str] = []
    while rounds == 0 or time.monotonic() < end:
        for name, (strategy, send) in list(every.items()):
            number = start + rounds + zlib.crc32(name.encode())
            count, why = _round(strategy, send, seed_=number, end=end)
            sent += count
            if why is not None:
                violations.append(f"{name} in round {rounds}: {why}")
                del every[name]
        try:
            servers.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the service is not as it was
            violations.append(f"after round {rounds}: {type(error).__name__}: {error}")
            break
        rounds += 1
    return {
        "seed": start,
        "rounds": rounds,
        "messages": sent,
        "answers": dict(servers.counts),
        "violations": violations,
    }


def _round(
    strategy: Any, send: Callable[[Any], None], *, seed_: int, end: float
) -> tuple[int, str | None]:
    """How many messages were sent, and the first that was not answered as it should be."""
    sent, why = 0, None

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seed(seed_)
    @given(strategy)
    def each(message: Any) -> None:
        nonlocal sent, why
        if why is not None or (sent and time.monotonic() > end):
            return
        sent += 1
        try:
            send(message)
        except Exception as error:  # noqa: BLE001 - told beside the others, with its message
            why = f"{message!r:.1000}: {type(error).__name__}: {error}"

    each()
    return sent, why


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Servers]:
    model = folder / "tiny"
    write_tiny(model, "qwen3", tokenizer=True)
    with serve(model, *FLAGS, "--weight-dir", str(model)) as running:
        servers = Servers(running.http, running.grpc, load_file(model / "model.safetensors"))
        try:
            yield servers
            assert running.process.poll() is None, "the service has ended"
        finally:
            servers.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as servers:
        found = run(servers, args.seconds, args.seed)
    print(json.dumps(found))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a fleet costs beside one engine: updates, the front, and a member's death.

    python benchmarks/fleet.py update CHECKPOINT [--sizes 2,4]    FSDP2 over 2 ranks; seconds, skew
    python benchmarks/fleet.py front CHECKPOINT [--streams 64,256]    requests with and without it
    python benchmarks/fleet.py front-http CHECKPOINT    the same streamed over /v1/completions
    python benchmarks/fleet.py front-told CHECKPOINT [--new-tokens 256]    of calls that are not
        streamed: a front that hears how far they are, beside one that does not
    python benchmarks/fleet.py death CHECKPOINT    a member killed: noticed, and caught up, when

Real processes, started here, one thread each; what is compared takes turns. Prints JSON lines, of
medians with least and most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from trainer_group import TRAINERS

SERVE = ("--port", "0", "--grpc-port", "0", "--exit-with-stdin")
CPU_OF = ("trainers", "service")
UNTOLD = """
import sys
from rollout.cli.main import main
from rollout.fleet.calls import call
call.INTERVAL = sys.maxsize
sys.exit(main())
"""
ENGINE = ("--device", "cpu", "--num-threads", "1", "--max-num-seqs", "256")


def main() -> None:
    args = parse_arguments()
    if args.rank is not None:
        trainer(args)
        return
    for line in COURSES[args.what](args):
        print(json.dumps({"checkpoint": Path(args.checkpoint).name, **line}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COURSES)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="2,4", help="members of the fleets")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--pids", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- processes ----


@contextlib.contextmanager
def service(
    *words: str, program: Sequence[str] = ("-m", "rollout")
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A ``rollout`` process: its HTTP and gRPC addresses once it is ready."""
    process = subprocess.Popen(
        [sys.executable, *program, *words, *SERVE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if not ready:
            sys.exit(f"rollout {' '.join(words)} did not start")
        http, grpc = (word.partition("=")[2] for word in ready[1:])
        yield http, grpc, process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def engine(checkpoint: str, *words: str) -> contextlib.AbstractContextManager[Any]:
    return service("serve", checkpoint, *ENGINE, *words)


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(value, 5) for value in (median(values), min(values), max(values))]


# ---- updates ----


def update(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same trainer updates one engine and a fleet in turns."""
    for size in map(int, args.sizes.split(",")):
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(engine(args.checkpoint, "--num-kv-blocks", "64", *replicas))
                for replicas in ((), ("--replicas", str(size)))
            ]
            command = [sys.executable, __file__, "update", args.checkpoint]
            command += ["--rounds", str(args.rounds)]
            command += ["--addresses", ",".join(grpc for _, grpc, _ in started)]
            command += ["--pids", ",".join(str(process.pid) for *_, process in started)]
            command += ["--scratch", stack.enter_context(tempfile.TemporaryDirectory())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks = []
            for rank in map(str, range(TRAINERS)):
                process = subprocess.Popen(
                    [*command, "--rank", rank], stdout=subprocess.PIPE, text=True, env=environment
                )
                ranks.append(stack.enter_context(process))
            lines = ranks[0].communicate(timeout=1200)[0].splitlines()
        rounds = [json.loads(line) for line in lines if line.startswith("[")]
        single, fleet = (list(column) for column in zip(*rounds[1:], strict=True))
        yield {
            "what": "update",
            "members": size,
            "transport": fleet[0]["transport"],
            "bytes": fleet[0]["bytes"],
            "one_s": spread([r["seconds"] for r in single]),
            "fleet_s": spread([r["seconds"] for r in fleet]),
            "of_one": spread(
                [f["seconds"] / o["seconds"] for o, f in zip(single, fleet, strict=True)]
            ),
            "one_cpu_s": {part: spread([r["cpu"][part] for r in single]) for part in CPU_OF},
            "fleet_cpu_s": {part: spread([r["cpu"][part] for r in fleet]) for part in CPU_OF},
            "fleet_cpu_of_wall": spread([sum(r["cpu"].values()) / r["seconds"] for r in fleet]),
            "stages_s": {
                part: [spread([r["times"][part] for r in rows]) for rows in (single, fleet)]
                for part in ("gather", "transfer", "stage", "verify", "commit")
            },
            "stall_s": spread([r["times"]["stall"] for r in fleet]),
            "skew_s": spread([r["skew"] for r in fleet]),
        }


def trainer(args: argparse.Namespace) -> None:
    """One of the ranks: an update of each address in each round."""
    import torch
    import torch.distributed as dist
    from trainer_group import sharded_checkpoint, trainer_group

    from rollout import Rollout

    def cpu_seconds(pid: int) -> list[float]:
        """Of all trainer ranks; of the service and what it has started."""
        used = torch.tensor([time.process_time(), 0.0], dtype=torch.float64)
        if args.rank == 0:
            used[1] = cpu_of_tree(pid)
        dist.all_reduce(used)
        return used.tolist()

    with contextlib.ExitStack() as stack:
        stack.enter_context(trainer_group(Path(args.scratch) / "rendezvous", args.rank, 900.0))
        model = sharded_checkpoint(args.checkpoint, "bfloat16")
        clients = [
            stack.enter_context(Rollout.connect(address)) for address in args.addresses.split(",")
        ]
        for _ in range(args.rounds + 1):  # the first builds the shadows
            found = []
            for client, pid in zip(clients, map(int, args.pids.split(",")), strict=True):
                before, began = cpu_seconds(pid), time.perf_counter()
                receipt = client.update_weights(model, encoding="full", timeout=300.0)
                seconds, after = time.perf_counter() - began, cpu_seconds(pid)
                found.append(
                    {
                        "seconds": seconds,
                        "cpu": dict(zip(CPU_OF, map(float.__sub__, after, before), strict=True)),
                        "times": receipt.timings,
                        "skew": float(receipt.details.get("commit_skew_seconds", 0.0)),
                        "transport": receipt.transport,
                        "bytes": receipt.num_bytes,
                    }
                )
            print(json.dumps(found), flush=True)


def cpu_of_tree(pid: int) -> float:
    """Seconds of CPU that a process and those that it has started have used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    children = (file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return used + sum(cpu_of_tree(int(child)) for found in children for child in found)


# ---- the front ----


def front(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One engine by itself, and the same one through a front, in turns."""
    with contextlib.ExitStack() as stack:
        direct, through = _pair(stack, args.checkpoint)
        kind = _Streams if args.what == "front-http" else _Calls
        pids = [process.pid for *_, process in (direct, through)]
        yield from asyncio.run(_front(args, pids, *(kind(*one[:2]) for one in (direct, through))))


def _pair(stack: contextlib.ExitStack, checkpoint: str, **how: Any) -> list[Any]:
    """An engine, and a front over it."""
    direct = stack.enter_context(engine(checkpoint))
    record = stack.enter_context(tempfile.TemporaryDirectory())
    words = ("fleet", "--engine", direct[1], "--record", record, "--lease", "20")
    return [direct, stack.enter_context(service(*words, **how))]


def front_told(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two pairs of an engine and a front: what each front costs its engine's calls, in turns."""
    with contextlib.ExitStack() as stack:
        programs = ("-m", "rollout"), ("-c", UNTOLD)
        pairs = [_pair(stack, args.checkpoint, program=one) for one in programs]
        pids = [[process.pid for *_, process in pair] for pair in pairs]
        clients = [[_Calls(*one[:2]) for one in pair] for pair in pairs]
        yield from asyncio.run(_told(args, pids, clients))


async def _told(
    args: argparse.Namespace, pids: Sequence[Sequence[int]], clients: Sequence[Sequence[_Calls]]
) -> list[dict[str, Any]]:
    """``pids`` and ``clients``: of an engine and its front, of both pairs."""
    numbers, lines = itertools.count(100), []
    asked = {"max_tokens": args.new_tokens, "temperature": 0.0, "ignore_eos": True}

    async def measured(pair: int, place: int, streams: int) -> tuple[float, float]:
        """Tokens per second, and CPU microseconds of a token."""
        prompts = [[next(numbers) % 5000 + 10, *range(10, 41)] for _ in range(streams)]
        before, began = sum(map(cpu_of_tree, pids[pair])), time.perf_counter()
        client = clients[pair][place]
        await asyncio.gather(*(client.generate(prompt, asked) for prompt in prompts))
        took, tokens = time.perf_counter() - began, streams * args.new_tokens
        return tokens / took, 1e6 * (sum(map(cpu_of_tree, pids[pair])) - before) / tokens

    try:
        for streams in map(int, args.streams.split(",")):
            places = [(pair, place) for pair in (0, 1) for place in (0, 1)]
            found: dict[tuple[int, int], list[tuple[float, float]]] = {p: [] for p in places}
            for turn in range(args.rounds + 1):
                for place in places if turn % 2 else reversed(places):
                    one = await measured(*place, streams)
                    found[place] += [one] if turn else []
            told, untold = (
                [f[0] / d[0] for d, f in zip(found[n, 0], found[n, 1], strict=True)] for n in (0, 1)
            )
            both = zip(found[0, 1], found[1, 1], strict=True)
            lines.append(
                {
                    "what": args.what,
                    "streams": streams,
                    "new_tokens": args.new_tokens,
                    "told_tokens_per_s": spread([rate for rate, _ in found[0, 1]]),
                    "untold_tokens_per_s": spread([rate for rate, _ in found[1, 1]]),
                    "told_of_untold": spread([a[0] / b[0] for a, b in both]),
                    "told_of_direct": spread(told),
                    "untold_of_direct": spread(untold),
                    "told_cpu_us_a_token": spread([cpu for _, cpu in found[0, 1]]),
                    "untold_cpu_us_a_token": spread([cpu for _, cpu in found[1, 1]]),
                    "direct_cpu_us_a_token": spread([c for n in (0, 1) for _, c in found[n, 0]]),
                }
            )
    finally:
        for client in (one for pair in clients for one in pair):
            await client.shutdown()
    return lines


class _Calls:
    """Calls over gRPC, each answered whole."""

    def __init__(self, http: str, grpc: str) -> None:
        from rollout import AsyncRollout

        self._client = AsyncRollout.connect(grpc, timeout=300.0)

    async def generate(self, prompt: list[int], asked: dict[str, Any]) -> None:
        await self._client.generate([prompt], asked)

    async def shutdown(self) -> None:
        await self._client.shutdown()


class _Streams:
    """Calls over HTTP, streamed token by token; a client that costs little."""

    def __init__(self, http: str, grpc: str) -> None:
        self._address = http

    async def generate(self, prompt: list[int], asked: dict[str, Any]) -> None:
        host, _, port = self._address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": prompt, "stream": True, **asked})
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        answer = b"".join([part async for part in _parts(reader)])
        writer.close()
        if b"data: [DONE]" not in answer:
            sys.exit(f"{self._address} answered {answer[:300]!r}")

    async def shutdown(self) -> None: ...


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part


async def _front(
    args: argparse.Namespace, pids: Sequence[int], *clients: _Calls | _Streams
) -> list[dict[str, Any]]:
    """``pids``: of the engine and the front, whose processor time is told, too."""
    numbers, lines = itertools.count(100), []

    async def one(client: _Calls | _Streams, new_tokens: int) -> None:
        prompt = [next(numbers) % 5000 + 10, *range(10, 41)]
        await client.generate(
            prompt, {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        )

    try:
        seconds: list[list[float]] = [[], []]
        for turn in range(40 * args.rounds + 10):
            for client, into in zip(clients, seconds, strict=True):
                began = time.perf_counter()
                await one(client, 1)
                into += [time.perf_counter() - began] if turn >= 10 else []
        extra = [b - a for a, b in zip(*seconds, strict=True)]
        lines.append(
            {
                "what": f"{args.what}, one request",
                "direct_s": round(median(seconds[0]), 5),
                "front_s": round(median(seconds[1]), 5),
                "extra_s": round(median(extra), 5),
                "requests": len(extra),
            }
        )
        for streams in map(int, args.streams.split(",")):
            rates: list[list[float]] = [[], []]
            # CPU microseconds of a token: of the engine, the front and this client.
            used: list[list[list[float]]] = [[], []]
            tokens = streams * args.new_tokens
            for turn in range(args.rounds + 1):
                for client, rate, cpu in zip(clients, rates, used, strict=True):
                    before, began = _cpu(pids), time.perf_counter()
                    await asyncio.gather(*(one(client, args.new_tokens) for _ in range(streams)))
                    took, after = time.perf_counter() - began, _cpu(pids)
                    if turn:
                        rate.append(tokens / took)
                        cpu.append(
                            [1e6 * (b - a) / tokens for a, b in zip(before, after, strict=True)]
                        )
            direct, through = ([spread(part) for part in zip(*each, strict=True)] for each in used)
            lines.append(
                {
                    "what": f"{args.what}, throughput",
                    "streams": streams,
                    "new_tokens": args.new_tokens,
                    "direct_tokens_per_s": spread(rates[0]),
                    "front_tokens_per_s": spread(rates[1]),
                    "of_direct": spread([b / a for a, b in zip(*rates, strict=True)]),
                    "direct_cpu_us_a_token": {"engine": direct[0], "client": direct[2]},
                    "front_cpu_us_a_token": dict(
                        zip(("engine", "front", "client"), through, strict=True)
                    ),
                }
            )
    finally:
        for client in clients:
            await client.shutdown()
    return lines


def _cpu(pids: Sequence[int]) -> list[float]:
    """Seconds that the services and this process have used."""
    return [*map(cpu_of_tree, pids), time.process_time()]


# ---- a death ----


def death(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A member of three is killed: until it does not serve; until its successor, once heard of,
    serves what was committed; beside an update.
    """
    from safetensors.torch import load_file

    from rollout import Rollout

    weights = load_file(Path(args.checkpoint) / "model.safetensors")
    noticed, caught_up, updates = [], [], []
    with contextlib.ExitStack() as stack:
        three = engine(args.checkpoint, "--num-kv-blocks", "64", "--replicas", "3")
        http, grpc, up = stack.enter_context(three)
        client = stack.enter_context(Rollout.connect(grpc))
        for _ in range(args.rounds):
            began = time.perf_counter()
            client.update_weights(weights, encoding="full")
            updates.append(time.perf_counter() - began)
            victim = members_of(up.pid)[0]
            began = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            wait_for(http, lambda rows: sum(r["status"] == "serving" for r in rows) < 3)
            noticed.append(time.perf_counter() - began)
            wait_for(http, lambda rows: any(is_new(row) for row in rows))
            began = time.perf_counter()
            wait_for(http, lambda rows: all(r["status"] == "serving" for r in rows))
            caught_up.append(time.perf_counter() - began)
    yield {
        "what": "death",
        "members": 3,
        "noticed_s": spread(noticed),
        "update_s": spread(updates),
        "caught_up_s": spread(caught_up),
        "caught_up_of_update": round(median(caught_up) / median(updates), 3),
    }


def is_new(row: dict[str, Any]) -> bool:
    """Heard of, with the weights that it was started with."""
    return row["status"] == "joining" and row["version"] == 0


def members_of(pid: int) -> list[int]:
    """The engines that a front has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return [c for c in found if b"serve" in Path(f"/proc/{c}/cmdline").read_bytes()]


def wait_for(http: str, holds: Any, limit: float = 300.0) -> None:
    deadline = time.monotonic() + limit
    while True:
        with urllib.request.urlopen(f"http://{http}/fleet/members", timeout=30) as reply:
            rows = json.load(reply)["members"]
        if holds(rows):
            return
        if time.monotonic() > deadline:
            sys.exit(f"not within {limit:g} s: {rows}")
        time.sleep(0.005)


COURSES = {
    "update": update, "front": front, "front-http": front, "front-told": front_told, "death": death,
}  # fmt: skip

if __name__ == "__main__":
    main()

"""Conversations over several engines: by a fleet's fronts, in turn, and by routers from PyPI.

    python benchmarks/routers.py CHECKPOINT [--engines 2] [--rounds 5] [--fronts 2] \\
        [--sglang-router PYTHON] [--vllm-router PYTHON] [--policies cache_aware,round_robin]

Each ``PYTHON`` is the interpreter of an environment of that router's own, as of
``python -m venv DIR && DIR/bin/pip install sglang-router==0.3.2`` (or ``vllm-router==0.1.17``).
Real processes, started here, over /v1/completions; the same engines, one thread each, serve all of
them by turns, with empty caches at the beginning of each. Prints JSON lines: hit rate (prompt
tokens found in a prefix cache), tokens a second, the 99th percentile of a turn's seconds; medians
with least and most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
from fleet import engine, service, spread

WAIT = 120.0  # seconds
ROUTERS = ("sglang_router", "vllm_router")
FIRST, MORE = 60, 15  # words of the first message, and of each later one


def main() -> None:
    args = parse_arguments()
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(engine(args.checkpoint)) for _ in range(args.engines)]
        engines = [f"http://{http}" for http, *_ in started]
        record = stack.enter_context(tempfile.TemporaryDirectory())
        members = itertools.chain(*(("--engine", grpc) for _, grpc, _ in started))
        first = stack.enter_context(service("fleet", *members, "--record", record))
        more = ("fleet", "--coordinator", first[1])
        fronts = [first[0]]
        fronts += [stack.enter_context(service(*more))[0] for _ in range(args.fronts - 1)]
        turns, of_fronts = itertools.cycle(engines), itertools.cycle(fronts)
        routes: dict[str, Callable[[], str]] = {
            "rollout": lambda: f"http://{fronts[0]}",
            "round robin": lambda: next(turns),
        }
        if len(fronts) > 1:  # each request through the next of them
            routes[f"rollout, {len(fronts)} fronts"] = lambda: f"http://{next(of_fronts)}"
        for module in ROUTERS:
            python = getattr(args, module)
            for policy in args.policies.split(",") if python else ():
                url = stack.enter_context(router(python, module, policy, engines))
                routes[f"{module.replace('_', '-')} {policy}"] = partial(str, url)
        for line in asyncio.run(measure(args, routes, engines)):
            print(json.dumps({"checkpoint": Path(args.checkpoint).name, **line}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--fronts", type=int, default=1, help="of the fleet, of which one coordinates"
    )
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--policies", default="cache_aware,round_robin", help="of those routers")
    for module in ROUTERS:
        parser.add_argument(f"--{module.replace('_', '-')}", metavar="PYTHON", help="see above")
    return parser.parse_args()


@contextlib.contextmanager
def router(python: str, module: str, policy: str, engines: list[str]) -> Iterator[str]:
    """Its address, once it serves; but for the policy, with its own settings."""
    port = free_port()
    command = [python, "-m", f"{module}.launch_router", "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines]
    command += ["--prometheus-port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WAIT
        while not answers(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the router did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


async def measure(
    args: argparse.Namespace, routes: dict[str, Callable[[], str]], engines: list[str]
) -> list[dict[str, object]]:
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in routes}
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(timeout=WAIT, limits=limits) as client:
        args.model = (await client.get(f"{engines[0]}/v1/models")).json()["data"][0]["id"]
        for turn in range(args.rounds + 1):
            for kind in sorted(routes, reverse=turn % 2 == 1):
                for url in engines:
                    (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()
                row = await converse(args, client, routes[kind], turn)
                rows[kind] += [row] if turn else []
    return [
        {
            "what": "routers",
            "by": kind,
            "engines": len(engines),
            "conversations": args.conversations,
            "turns": args.turns,
            "hit_rate": spread([row[0] for row in found]),
            "tokens_per_s": spread([row[1] for row in found]),
            "p99_s": spread([row[2] for row in found]),
        }
        for kind, found in rows.items()
    ]


async def converse(
    args: argparse.Namespace, client: httpx.AsyncClient, route: Callable[[], str], seed: int
) -> tuple[float, float, float]:
    """Share of prompt tokens that were cached, tokens a second, the 99th percentile of turns."""
    rng, seconds = random.Random(seed), []
    counts = {"prompt": 0, "cached": 0, "new": 0}

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(5000)}" for _ in range(count))

    async def talk(said: str) -> None:
        for _ in range(args.turns):
            body = {"model": args.model, "prompt": said, "max_tokens": args.new_tokens}
            began = time.perf_counter()
            reply = await client.post(
                f"{route()}/v1/completions", json={**body, "temperature": 0, "ignore_eos": True}
            )
            seconds.append(time.perf_counter() - began)
            if reply.status_code != 200:
                sys.exit(f"{reply.url}: {reply.status_code}: {reply.text:.300}")
            answer = reply.json()
            counts["prompt"] += answer["usage"]["prompt_tokens"]
            counts["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            counts["new"] += answer["usage"]["completion_tokens"]
            said = f"{said}{answer['choices'][0]['text']} {words(MORE)}"

    starts = [words(FIRST) for _ in range(args.conversations)]
    began = time.perf_counter()
    await asyncio.gather(*map(talk, starts))
    took = time.perf_counter() - began
    last = sorted(seconds)[min(len(seconds) - 1, len(seconds) * 99 // 100)]
    return counts["cached"] / counts["prompt"], counts["new"] / took, last


if __name__ == "__main__":
    main()

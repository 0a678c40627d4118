"""Calls on an engine over the toy model, and a sink that waits for their end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from engine_core.toy_model import VOCAB

from rollout.engine.core import EngineCore
from rollout.engine.pins import PinTerms
from rollout.engine.requests.request_state import Snapshot
from rollout.generation import Request, RequestOutput, SamplingParams

PROMPT = list(range(5, 23))
Start = Callable[..., EngineCore]


class Sink:
    """Collects what a call gets; ``result`` waits for its last output or its error."""

    def __init__(self, count: int = 1) -> None:
        self.items: list[RequestOutput | BaseException] = []
        self._left = count
        self._done = threading.Event()

    def __call__(self, item: Snapshot | BaseException) -> None:
        self.items.append(item if isinstance(item, BaseException) else item.output())
        if isinstance(item, BaseException) or item.finished:
            self._left -= 1
        if isinstance(item, BaseException) or self._left == 0:
            self._done.set()

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while len(self.items) < count:
            assert time.monotonic() < deadline, f"only {len(self.items)} of {count} came"
            time.sleep(0.001)

    def results(self) -> dict[str, RequestOutput]:
        assert self._done.wait(10), "the call did not end"
        for item in self.items:
            if isinstance(item, BaseException):
                raise item
        return {o.request_id: o for o in self.items if isinstance(o, RequestOutput) and o.finished}


def request(name: str = "a", prompt: list[int] | None = None, **params: Any) -> Request:
    ids = tuple(PROMPT if prompt is None else prompt)
    return Request(request_id=name, prompt_token_ids=ids, params=SamplingParams(**params))


def run(core: EngineCore, *requests: Request, stream: bool = False) -> dict[str, RequestOutput]:
    sink = Sink(len(requests))
    core.submit(requests, sink, stream=stream)
    return sink.results()


def random_requests(rng: random.Random, prefix: str = "") -> list[Request]:
    """Prompts, stops and settings of every kind, in what the toy model serves."""
    found = []
    for i in range(rng.randint(1, 12)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        most = rng.randint(1, 40)
        params = {
            "n": rng.choice([1, 1, 1, 3]),
            "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 3, 10]))),
            "min_tokens": min(most, rng.choice([0, 0, 1, 9])),
            "logprobs": rng.choice([None, 0, 2]),
            "prompt_logprobs": rng.choice([None, None, 0]),
            **rng.choice([{}, {}, {}, {"presence_penalty": 0.1}]),
        }
        found.append(request(f"{prefix}{i}", prompt, max_tokens=most, **params))
    return found


def comparable(out: RequestOutput) -> Any:
    """All that an answer says, whoever gave it."""
    return out.prompt_logprobs, [
        (s.token_ids, s.logprobs, s.finish_reason, s.stop_reason, s.weight_versions, s.kv_spans)
        for s in out.outputs
    ]


def commit(
    core: EngineCore, version: int, in_flight: str = "keep", pin: PinTerms | None = None
) -> None:
    def boundary() -> None:
        for future in core.call("commit", {"version": version}):
            future.result(5)
        core.on_commit(version, in_flight, pin)

    core.at_step_boundary(boundary).result(5)


def held(core: EngineCore, steps: int, **params: Any) -> Sink:
    """A streaming request that has given ``steps`` tokens and stands still in a pause."""
    sink, asked = Sink(), SimpleQueue[Future[None]]()

    def hold(item: Snapshot | BaseException) -> None:
        """In the loop's own thread: however busy the machine is, few steps come between."""
        sink(item)
        if len(sink.items) == steps:
            asked.put(core.at_step_boundary(lambda: core.control.pause("keep").result()))

    core.submit([request(**params)], hold, stream=True)
    asked.get(timeout=10).result(10)
    return sink

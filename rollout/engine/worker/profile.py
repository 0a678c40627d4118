"""Where the time of a step goes on one rank.

Functions are measured by standing in their place while a profile runs; otherwise nothing of this
is on any path (a ``torch.profiler.record_function`` costs microseconds also where nobody profiles,
and a step has hundreds of ops). A device that runs behind is waited for at every look at the clock,
so a profiled step is slower than others, and what runs as one captured graph is one span. What runs
otherwise as one native call for all blocks runs op by op.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.distributed.stage import Stage
from rollout.engine.worker.graphs.decode_graphs import DecodeGraphs
from rollout.engine.worker.graphs.prefill_graphs import PrefillGraphs
from rollout.kernels.op import watch_ops
from rollout.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from rollout.engine.worker.model_runner import ModelRunner

DECODE, PREFILL = "decode", "prefill"  # a step with any prompt chunk is a prefill step
READ_BYTES = 256 << 20  # beyond any cache
READ_ROUNDS = 5


class Spans:
    """Times of named functions of one thread, by where they were called from and kind of step.

    ``figures[kind]["seconds"]["step/forward/linear"]``: own seconds of "linear" inside "forward"
    inside "step", ``calls`` how often it was entered; the own seconds of a path and of all below it
    add up to what it took. Calls on other threads than ``thread`` (an id; 0 is none) run
    unmeasured. ``wait``: called before every look at the clock, for devices that run behind.
    """

    def __init__(self, wait: Callable[[], Any] | None = None) -> None:
        self.thread = 0
        self.figures: dict[str, dict[str, Any]] = {}
        self._wait = wait
        self._replaced = ExitStack()
        self._totals: dict[str, tuple[float, int]] = {}  # of the step under way
        self._path = ""
        self._inside = 0.0  # seconds of the spans that ended within the present one

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, measured as the span ``name``."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return run(*args, **kwargs)
            outer, before = self._path, self._inside
            path = self._path = f"{outer}/{name}" if outer else name
            self._inside = 0.0
            started = self._now()
            try:
                return run(*args, **kwargs)
            finally:
                took = self._now() - started
                seconds, calls = self._totals.get(path, (0.0, 0))
                self._totals[path] = seconds + took - self._inside, calls + 1
                self._path, self._inside = outer, before + took

        return measured

    def end_step(self, kind: str | None, **sums: int) -> None:
        """Add what was measured since the last call to a step's ``kind``; None: forget it."""
        totals, self._totals = self._totals, {}
        if kind is None:
            return
        into = self.figures.setdefault(kind, {"steps": 0, "seconds": {}, "calls": {}})
        for path, (seconds, calls) in totals.items():
            into["seconds"][path] = into["seconds"].get(path, 0.0) + seconds
            into["calls"][path] = into["calls"].get(path, 0) + calls
        for name, value in {"steps": 1, **sums}.items():
            into[name] = into.get(name, 0) + value

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """``owner.name`` is ``new`` until ``restore``; an inherited attribute is found again."""
        if name in vars(owner):
            self._replaced.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._replaced.callback(delattr, owner, name)
        setattr(owner, name, new)

    def time(self, owner: Any, name: str, span: str = "") -> None:
        """Measure ``owner.name``, as the span of that name or another, until ``restore``."""
        self.replace(owner, name, self.timed(span or name, getattr(owner, name)))

    def restore(self) -> None:
        self._replaced.close()

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return time.perf_counter()


class RankProfile:
    """Measures the steps of one rank from its making until ``close``; on the rank's main thread.

    ``forward`` holds the ops and collectives by name; its own seconds are the modules around
    them. ``weight_bytes`` and ``kv_bytes``: what a step must read at least once. A model of
    experts counts them all, though few tokens need but some.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._read = _read_weights(runner)
        self._spans = spans = Spans(
            torch.cuda.synchronize if runner.device.type == "cuda" else None
        )
        spans.replace(runner, "step", self._step(spans.timed("step", _to_its_end(runner.step))))
        spans.time(runner, "forward")
        spans.time(runner.sampler, "sample")
        spans.time(DecodeGraphs, "draw", "forward")  # one replay behind the other
        spans.time(PrefillGraphs, "run", "forward")
        if runner.tp.size > 1:
            spans.time(type(runner.tp), "all_reduce")
            spans.time(type(runner.tp), "all_gather")
        if runner.stage.count > 1:
            spans.time(Stage, "take", "from the stage before")
            spans.time(Stage, "settle", "to the stage behind")
        watch_ops(spans.timed)

    def close(self) -> dict[str, Any]:
        """End measuring; what was found, by kind of step."""
        watch_ops(None)
        self._spans.restore()
        return {"kinds": self._spans.figures}

    def _step(self, run: Any) -> Any:
        def step(args: Any, tensors: Mapping[str, Tensor], *version: Any) -> Any:
            self._spans.thread = threading.get_ident()
            reply = run(args, tensors, *version)
            rows, lengths = len(tensors["positions"]), tensors["context_lens"]
            kind = DECODE if rows == len(lengths) else PREFILL
            shape = self._runner.kv.shape
            kv = shape.bytes_read(lengths)
            self._spans.end_step(kind, weight_bytes=self._read, kv_bytes=kv)
            return reply

        return step


def _to_its_end(begin: Any) -> Any:
    def step(*args: Any) -> Any:
        reply = begin(*args)()
        return lambda: reply

    return step


def read_speed(device: torch.device) -> float:
    """Bytes a second that this rank reads from memory with its threads: the best of a few."""
    values = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(READ_ROUNDS):
        started = time.perf_counter()
        torch.dot(values, values).item()
        best = min(best, time.perf_counter() - started)
    return READ_BYTES / best


def _read_weights(runner: ModelRunner) -> int:
    """Bytes of parameters that every forward reads: all but an untied embedding's rows."""
    live = runner.instances.live.policy
    weights = sum(p.numel() * p.element_size() for p in live.parameters())
    looked_up = 0
    if isinstance(live, CausalLM) and live.lm_head is not None:
        rows = live.model.embedding.parameters()  # none on later stages
        looked_up = sum(p.numel() * p.element_size() for p in rows)
    return weights - looked_up

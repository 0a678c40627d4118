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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.kernels.op import watch_ops
from rollout.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from rollout.engine.worker.model_runner import ModelRunner

DECODE, PREFILL = "decode", "prefill"  # a step with any prompt chunk is a prefill step
READ_BYTES = 256 << 20  # beyond any cache
READ_ROUNDS = 5

Figures = dict[str, dict[str, Any]]  # by kind of step: steps, seconds, calls, bytes


@dataclass(slots=True)
class SpanTotal:
    """Seconds inside one span, those of spans within it apart, and how often it was entered."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class Spans:
    """Times of named functions of one thread, by where they were called from.

    ``totals["step/forward/linear"]``: own seconds of "linear" inside "forward" inside "step"; the
    own seconds of a path and of all below it add up to what it took. Calls on other threads than
    ``thread`` (an id; 0 is none) run unmeasured. ``wait``: called before every look at the clock,
    for devices that run behind.
    """

    wait: Callable[[], Any] | None = None
    thread: int = 0
    totals: dict[str, SpanTotal] = field(default_factory=dict)
    _path: str = ""
    _inside: float = 0.0  # seconds of the spans that ended within the present one

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
                seconds = self._now() - started
                total = self.totals.setdefault(path, SpanTotal())
                total.seconds += seconds - self._inside
                total.calls += 1
                self._path, self._inside = outer, before + seconds

        return measured

    def take(self) -> dict[str, SpanTotal]:
        """What was measured since the last call."""
        totals, self.totals = self.totals, {}
        return totals

    def _now(self) -> float:
        if self.wait is not None:
            self.wait()
        return time.perf_counter()


class Watched:
    """Attributes of objects replaced by measured ones, until ``close`` puts back what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """``owner.name`` becomes ``make(owner.name)``; an inherited attribute is found again."""
        own = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))
        if own is None:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class KindTotals:
    """Adds up finished steps, decode steps and those with prompt tokens apart."""

    def __init__(self) -> None:
        self.figures: Figures = {}

    def add(self, kind: str, spans: Mapping[str, SpanTotal], **sums: int) -> None:
        into = self.figures.setdefault(kind, {"steps": 0, "seconds": {}, "calls": {}})
        into["steps"] += 1
        for path, total in spans.items():
            into["seconds"][path] = into["seconds"].get(path, 0.0) + total.seconds
            into["calls"][path] = into["calls"].get(path, 0) + total.calls
        for name, value in sums.items():
            into[name] = into.get(name, 0) + value


class RankProfile:
    """Measures the steps of one rank from its making until ``close``; on the rank's main thread.

    ``forward`` holds the ops and collectives by name; its own seconds are the modules around
    them. ``weight_bytes`` and ``kv_bytes``: what a step must read at least once. A model of
    experts counts them all, though few tokens need but some.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        device = runner.device
        wait = torch.cuda.synchronize if device.type == "cuda" else None
        self._spans, self._totals, self._watched = Spans(wait), KindTotals(), Watched()
        self._read = _read_weights(runner)
        self._replace()

    def close(self) -> dict[str, Any]:
        """End measuring; what was found, by kind of step."""
        watch_ops(None)
        self._watched.close()
        return {"kinds": self._totals.figures}

    def _replace(self) -> None:
        runner, timed, replace = self._runner, self._spans.timed, self._watched.replace
        replace(runner, "step", lambda run: self._step(timed("step", _to_its_end(run))))
        replace(runner, "forward", lambda run: timed("forward", run))
        replace(runner.sampler, "sample", lambda run: timed("sample", run))
        if runner.tp.size > 1:
            replace(type(runner.tp), "all_reduce", lambda run: timed("all_reduce", run))
            replace(type(runner.tp), "all_gather", lambda run: timed("all_gather", run))
        watch_ops(timed)

    def _step(self, run: Any) -> Any:
        def step(args: Any, tensors: Mapping[str, Tensor], version: int) -> Any:
            self._spans.thread = threading.get_ident()
            reply = run(args, tensors, version)
            rows, lengths = len(tensors["positions"]), tensors["context_lens"]
            kind = DECODE if rows == len(lengths) else PREFILL
            shape = self._runner.kv.shape
            kv = int(lengths.sum()) * shape.block_bytes // shape.block_size
            self._totals.add(kind, self._spans.take(), weight_bytes=self._read, kv_bytes=kv)
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
    live = runner.instances.live
    looked_up = 0
    if isinstance(live, CausalLM) and live.lm_head is not None:
        weight = live.model.embed_tokens.weight
        looked_up = weight.numel() * weight.element_size()
    return runner.weight_bytes - looked_up

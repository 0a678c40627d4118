"""A thread that samples from a rollout service without a pause, while somebody else trains."""

from __future__ import annotations

import argparse
import random
import threading
from collections import Counter, deque

from addition_task import problems
from answering import answers
from grpo import Sample

from rollout import Rollout


class Sampler(threading.Thread):
    """Calls the service without a pause; keeps the samples of the last two calls that ended.

    ``mixed``: samples that a commit fell into. ``stale``: those beyond ``max_staleness``, by what
    became of them. One that was ended for it is no whole answer: all of its prompt are dropped.
    """

    def __init__(self, address: str, args: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.calls = self.tokens = self.mixed = self.dropped = 0
        self.stale: Counter[str] = Counter()
        self._address, self._settings = address, args
        self._ended: deque[list[Sample]] = deque(maxlen=2)
        self._news, self._done = threading.Condition(), False
        self._failure: BaseException | None = None

    def run(self) -> None:
        a = self._settings
        bound = {"max_staleness": a.max_staleness, "on_stale": a.on_stale}
        try:
            with Rollout.connect(self._address) as rollout:
                while not self._done:
                    asked = problems(a.prompts, random.Random(f"{a.seed}-{self.calls}"))
                    first = (a.seed * 100_000 + self.calls) * 1000
                    seeds = range(first, first + len(asked))
                    self._put(answers(rollout, asked, a.samples, seeds, **bound))
        except Exception as error:  # noqa: BLE001 - raised where the samples are waited for
            self._failure = error
            with self._news:
                self._news.notify()

    def _put(self, samples: list[Sample]) -> None:
        self.stale.update(s.stale for s in samples if s.stale)
        whole = self._whole_groups(samples)
        with self._news:
            self.calls += 1
            self.tokens += sum(len(s.answer) for s in samples)
            self.mixed += sum(len(set(s.versions)) > 1 for s in samples)
            self.dropped += len(samples) - len(whole)
            if whole:
                self._ended.append(whole)
                self._news.notify()

    def _whole_groups(self, samples: list[Sample]) -> list[Sample]:
        size = self._settings.samples
        groups = [samples[n : n + size] for n in range(0, len(samples), size)]
        return [s for group in groups if not any(s.is_cut for s in group) for s in group]

    def take(self) -> list[Sample]:
        """The older of the calls that are kept; waits for one, a minute at most."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._failure, 60)
            if not self._ended:
                raise RuntimeError("no samples came") from self._failure
            return self._ended.popleft()

    def stop(self) -> None:
        self._done = True
        self.join(60)

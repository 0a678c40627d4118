"""Trainer ranks as threads that remember what they committed, and count their gathers."""

from __future__ import annotations

import threading

from peers import Boxes, agreements, rows
from trainer import BUCKET

from rollout.weight_sync.protocol.delta import DeltaBase
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache


class Gathered(Boxes):
    """Boxes whose ranks can also gather, and say how often they did."""

    gathers = 0

    def __iter__(self):
        Gathered.gathers += 1
        for name, tensor in self._weights.items():
            yield name, tensor if self.agreement.is_sender else tensor.to("meta")


class Ranks:
    """Trainer ranks with what each remembers between updates."""

    def __init__(self, engine, size, place=rows):
        self.engine, self.size, self.place = engine, size, place
        self.bases = [DeltaBase() for _ in range(size)]
        self.plans = [PlanCache() for _ in range(size)]

    def send(self, weights, *, on_read=None, link=None, links=None, **options):
        """The receipt, which all ranks got; or the errors of all."""
        keywords = {
            "transport": "inline", "encoding": "delta", "bucket_bytes": BUCKET, "timeout": 10.0,
            **options,
        }  # fmt: skip
        got: list = [None] * self.size

        def run(rank, agreement):
            source = Gathered(weights, agreement, self.place)
            if on_read is not None:
                source.on_read = lambda name: on_read(rank, name)
            try:
                got[rank] = publish(
                    source,
                    connect=lambda: links[rank] if links else link or self.engine,
                    options=UpdateOptions(**keywords),
                    base=self.bases[rank],
                    plans=self.plans[rank],
                )
            except BaseException as error:
                got[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank, agreement))
            for rank, agreement in enumerate(agreements(self.size))
        ]
        Gathered.gathers = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        errors = [one for one in got if isinstance(one, BaseException)]
        if errors:
            assert len(errors) == self.size
            raise errors[0]
        assert all(one == got[0] for one in got)
        return got[0]

"""A fleet over engines of this process, and the verbs over it."""

from rollout import AsyncRollout, Rollout
from rollout.fleet.backend import FleetBackend
from rollout.fleet.fleet import Fleet
from rollout.fleet.record import Record

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256}
LEASE = 2.5  # half of it is a pause that a busy machine may make


class Front:
    """A fleet and the verbs over it."""

    def __init__(self, record, engines, lease=LEASE, **options):
        self.fleet = Fleet(Record(record, lease), lease=lease, **options)
        self.names = [self.fleet.add(engine.address) for engine in engines]
        self.backend = FleetBackend(self.fleet)
        self.rollout = Rollout.over(lambda: AsyncRollout.over(self.backend))

    def close(self):
        self.rollout.shutdown()

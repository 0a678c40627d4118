"""A fleet over engines of this process, and the verbs over it."""

import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import forked_ranks

from rollout import AsyncRollout, Rollout
from rollout.fleet.coordination.record import Record
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.backend import FleetBackend
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.fronts.routing_front import RoutingFront
from rollout.rpc.client import RolloutClient

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256}
LEASE = 2.5  # half of it is a pause that a busy machine may make


def break_off(engine):
    """End one with all that runs there, which ``shutdown`` by itself would let end for a second."""
    engine._async.backend.close()
    engine.shutdown()


class Front:
    """A fleet and the verbs over it."""

    def __init__(self, record, engines, lease=LEASE, port=0, **options):
        self.fleet = Fleet(Record(record, lease), lease=lease, **options)
        self.names = [self.fleet.add(engine.address) for engine in engines]
        self.backend = FleetBackend(self.fleet)
        self.rollout = Rollout.over(lambda: AsyncRollout.over(self.backend))
        if port:
            self.rollout._loop.run(self.rollout._async.serve(port=port))

    def close(self):
        self.rollout.shutdown()


class OneMore:
    """A front that routes only, beside the one at ``coordinator``, and the verbs over it."""

    def __init__(self, coordinator, token=None, tls=None):
        self.fleet = RoutedFleet(RolloutClient(coordinator, token, tls=tls, keeps_epoch=False))
        self.backend = RoutingFront(self.fleet, start_timeout=60.0)
        self.rollout = Rollout.over(lambda: AsyncRollout.over(self.backend))

    def close(self):
        self.rollout.shutdown()


def front_process(record, *engines, grpc_port=0, flags=(), forked=True):
    """``rollout fleet`` over engines: its process, and its HTTP and gRPC addresses."""
    words = [word for engine in engines for word in ("--engine", engine)]
    return fleet_process(
        "--record", str(record), *words, *flags, grpc_port=grpc_port, forked=forked
    )


@contextmanager
def fleet_process(*flags, grpc_port=0, forked=True):
    """``forked`` as of a server: see ``serving``."""
    words = [sys.executable, "-m", "rollout", "fleet", "--port", "0", "--exit-with-stdin"]
    words += ["--grpc-port", str(grpc_port), "--start-timeout", "120", *flags]
    popen, pipe = (forked_ranks if forked else subprocess).Popen, subprocess.PIPE
    process = popen(words, stdin=pipe, stdout=pipe, text=True, env=dict(os.environ))
    try:
        line = process.stdout.readline().split()
        assert line[:1] == ["ready"], line
        http, grpc = (word.partition("=")[2] for word in line[1:])
        yield SimpleNamespace(process=process, http=http, grpc=grpc)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise

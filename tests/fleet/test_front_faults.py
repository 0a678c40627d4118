"""A front as a process of its own is killed and stopped within updates, and its disk fills."""

import resource
import signal
import socket
import threading
import time
from contextlib import closing

import pytest
from fleet_front import front_process
from shared_engines import eventually
from tiny_models import randomize

from rollout import Rollout
from rollout.errors import EngineClosed, RolloutError

pytestmark = pytest.mark.more
GREEDY = {"max_tokens": 3, "temperature": 0.0}
LEASE = 2.0  # the command's own
LIMIT = 90.0  # s in which everything ends, on a slow machine too


class Course:
    """One fleet through all of it. ``models``: what each version would be, by its number."""

    def __init__(self, engines, record, model):
        self.engines, self.record, self.model = engines, record, model
        self.acknowledged, self.sent = 0, {}
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]

    def front(self):
        return front_process(self.record, *(e.address for e in self.engines), grpc_port=self.port)

    def prepared(self):
        return any(engine._async.backend.prepared for engine in self.engines)

    def committed(self):
        return any(engine._async.backend.core.version > self.version for engine in self.engines)

    def written(self):
        return (self.record / "fleet.sqlite").stat().st_mtime_ns != self.mtime

    def update(self, client, when, do):
        """Send other weights, with ``do()`` in the moment of ``when``; its error, if it failed."""
        randomize(self.model)
        self.version = client.weight_version
        self.mtime = (self.record / "fleet.sqlite").stat().st_mtime_ns
        weights = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.sent[self.version + 1] = weights
        over = threading.Event()

        def watch():
            while not over.is_set() and not when():
                time.sleep(0.0005)
            do()

        def source():
            for index, item in enumerate(weights.items()):
                if index == 3 and when is None:
                    do()
                yield item

        watcher = threading.Thread(target=watch) if when else None
        if watcher:
            watcher.start()
        begun = time.monotonic()
        try:
            self.acknowledged = client.update_weights(source(), timeout=5).version
        except RolloutError as error:
            return error
        finally:
            over.set()
            if watcher:
                watcher.join(LIMIT)
            assert time.monotonic() - begun < LIMIT
        return None

    def outcome(self, client):
        """Of an update without anything."""
        return self.update(client, lambda: True, lambda: None)

    def check(self, client):
        """Every client, of the front or of an engine, sees one version: none that was answered is
        lost, and it is whole. Asked again where leases run out meanwhile, as on a busy machine.
        """
        eventually(lambda: self._is_checked(client), LIMIT)

    def _is_checked(self, client):
        try:
            members = client.metrics().members.values()
            if not all(row.startswith("serving") for row in members):
                return False
            self._check(client)
        except EngineClosed:  # none serves
            return False
        return True

    def _check(self, client):
        versions = {engine.weight_version for engine in self.engines}
        assert versions == {client.weight_version}
        [version] = versions
        assert version >= self.acknowledged
        assert version in (self.acknowledged, max(self.sent))
        if version in self.sent:
            assert client.check_weights(list(self.sent[version].items())).equal
            for engine in self.engines:
                assert engine.check_weights(list(self.sent[version].items())).equal
        [output] = client.generate([[1, 2, 3]], GREEDY)
        assert {span.version for span in output.outputs[0].weight_versions} == {version}
        assert not self.prepared()
        self.acknowledged = version


def test_a_front_that_is_killed_or_stopped_or_out_of_disk_loses_nothing(engines, tmp_path, trained):
    course = Course(engines[:2], tmp_path / "record", trained)
    for when in (None, course.prepared, course.written):
        with course.front() as front, Rollout.connect(front.grpc) as client:
            if when:
                course.check(client)  # as the one before has left it
            assert course.outcome(client) is None
            course.update(client, when, front.process.kill)
            front.process.wait(10)
            with pytest.raises(RolloutError):
                client.generate([[1, 2, 3]], GREEDY)
    with course.front() as front, Rollout.connect(front.grpc) as client:
        course.check(client)
        for when in (None, course.prepared, course.committed):
            course.update(client, when, _stopped(front.process, course.engines[0]))
            course.check(client)
        _fill_the_disk(course, front.process.pid, client)


def _fill_the_disk(course, pid, client):
    """No byte more can be written under the record, as its front sees it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert course.outcome(client) is None
    version = client.weight_version
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    for _ in range(2):
        assert "the fleet's record could not be written" in str(course.outcome(client))
        assert client.weight_version == version
        course.check(client)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert course.outcome(client) is None
    assert client.weight_version == version + 1
    course.check(client)


def _stopped(process, engine):
    """Stop it until leases have run out: no engine serves then, not even who asks it directly."""

    def stop():
        process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: engine.metrics().state == "fenced", 5 * LEASE)
            with pytest.raises(EngineClosed, match="lease has run out"):
                engine.generate([[1, 2]], GREEDY)
        finally:
            process.send_signal(signal.SIGCONT)

    return stop

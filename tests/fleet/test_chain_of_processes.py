"""Members in processes of their own, on hosts of their own as they believe, that fail mid-way."""

import os
import signal
from pathlib import Path

import pytest
from fleet_front import Front
from forked import Script

from rollout import Rollout

pytestmark = pytest.mark.more
WAIT = 60.0  # seconds: for hangs
OPTIONS = {"bucket_bytes": 32 << 10, "timeout": 8.0}  # a quarter of it is a feed's silence
HERE = Path(__file__).parent


@pytest.fixture
def members(checkpoint, tmp_path):
    """Four processes."""
    started = []
    for host in ("one", "two", "three", "four"):
        arguments = [checkpoint, host]
        started.append(Script(HERE / "far_member.py", arguments, tmp_path / f"{host}.log"))
    yield started
    for script in started:
        script.kill()
        script.wait(WAIT)
        script.close()


def weights(model, when, then):
    """All of them; before tensor number ``when``, ``then`` is done."""
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        if number == when:
            then()
        yield name, tensor


def test_one_that_takes_bytes_on_may_be_stopped_or_killed_in_the_middle(
    members, tmp_path, trained, oracle
):
    addresses = [script.stdout.readline().decode().strip() for script in members]

    class Member:
        def __init__(self, address):
            self.address = address

    front = Front(tmp_path / "record", map(Member, addresses), quorum=2)
    first, second, third, fourth = front.names
    middle = len(trained.state_dict()) // 2

    def update(then=lambda: None):
        receipt = front.rollout.update_weights(weights(trained, middle, then), **OPTIONS)
        fed, sent = receipt.details["members_fed_by"], receipt.details["front_sent_bytes"]
        held = {name for name, how in receipt.details["members"].items() if how == "committed"}
        return held, fed, sent, receipt.wire_bytes

    def equal(*names):
        for name in names:
            with Rollout.connect(name) as one:
                assert one.check_weights(trained).equal, name

    try:
        front.fleet.wait_serving(4, WAIT)
        held, fed, sent, whole = update()
        assert held == set(front.names)
        assert sent == {first: whole, second: 0, third: 0, fourth: 0}
        assert fed == {first: "the front", second: first, third: second, fourth: third}

        held, fed, sent, whole = update(lambda: os.kill(members[1].pid, signal.SIGSTOP))
        assert held == {first, third, fourth}
        assert fed[fourth] == third
        assert "the front from bucket" in fed[third]
        assert "no sign of life" in fed[third]
        assert sent[first] == whole
        assert 0 < sent[third] < whole
        assert sent[fourth] == 0
        equal(*held)

        os.kill(members[1].pid, signal.SIGCONT)
        front.fleet.wait_serving(4, WAIT)  # which another has brought up to date
        held, fed, sent, whole = update(lambda: os.kill(members[0].pid, signal.SIGKILL))
        assert held == {second, third, fourth}
        assert "the front from bucket" in fed[second]
        assert fed[third] == second
        assert fed[fourth] == third
        assert 0 < sent[second] < whole
        assert sent[third] == sent[fourth] == 0
        equal(*held)
    finally:
        os.kill(members[1].pid, signal.SIGCONT)
        front.close()

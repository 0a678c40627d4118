"""Three tiny engines of this process, each served at an address, and a fleet over them."""

import copy
import threading

import pytest
from fleet_front import ENGINE, Front
from shared_engines import eventually
from tiny_models import write_tiny

from rollout import Rollout


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet")
    write_tiny(path, tokenizer=True)
    return str(path)


@pytest.fixture(scope="session")
def one_trained(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("trained"), seed=1, tokenizer=True)


@pytest.fixture
def trained(one_trained):
    """Another model of the same shape, which the test may change."""
    return copy.deepcopy(one_trained)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """An engine that was started with the trained weights."""
    path = tmp_path_factory.mktemp("oracle")
    write_tiny(path, seed=1, tokenizer=True)
    with Rollout(str(path), **ENGINE) as rollout:
        yield rollout


@pytest.fixture
def engines(checkpoint, request):
    """A test may ask for settings by ``indirect``."""
    settings = {**ENGINE, **getattr(request, "param", {})}
    started = [Rollout(checkpoint, **settings) for _ in range(3)]
    yield started
    for engine in started:
        engine.shutdown()


@pytest.fixture
def front(engines, tmp_path):
    front = Front(tmp_path / "record", engines)
    yield front
    front.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """What ends by itself after a front was closed has some time for it."""
    before = set(threading.enumerate())

    def left():
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if thread.name.startswith("rollout-fl")]

    yield
    eventually(lambda: not left(), 30)

"""One tiny engine for the whole area, served over gRPC, and clients of it."""

import contextlib
import os

import pytest
import torch
from shared_engines import eventually, left_serving
from tiny_models import write_tiny

from rollout import Rollout

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 128, "max_model_len": 512}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, tokenizer=True)
    return str(path)


@pytest.fixture(scope="session")
def bare_checkpoint(tmp_path_factory):
    """Without a tokenizer."""
    path = tmp_path_factory.mktemp("bare")
    write_tiny(path)
    return str(path)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory):
    """Another model of the same shape."""
    return write_tiny(tmp_path_factory.mktemp("other"), seed=1, tokenizer=True).state_dict()


@pytest.fixture(scope="session")
def engine(checkpoint):
    with Rollout(checkpoint, **ENGINE) as rollout:
        yield rollout


@pytest.fixture
def client(engine):
    with Rollout.connect(engine.address, timeout=10) as rollout:
        yield rollout


@pytest.fixture(autouse=True)
def _engine_is_left_serving(request):
    shared = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    yield from left_serving(request.node.name, shared)


@pytest.fixture
def changed():
    """A set of weights moved by one step of a trainer."""

    def change(state, by):
        return {name: value + by * torch.ones_like(value) for name, value in state.items()}

    return change


@pytest.fixture
def process():
    """Start subprocesses that are surely gone at the end."""
    with contextlib.ExitStack() as stack:

        def start(popen):
            stack.callback(popen.wait)
            stack.callback(lambda: popen.poll() is None and os.kill(popen.pid, 9))
            if popen.stdout is not None:
                stack.callback(popen.stdout.close)
            return popen

        yield start


@pytest.fixture(name="eventually")
def _eventually():
    return eventually

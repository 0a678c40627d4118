"""One tiny engine for the whole area, served over gRPC, and clients of it."""

import contextlib
import os
import time

import pytest
import torch
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


def _eventually(condition, seconds=5.0):
    """Wait until ``condition()`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


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


@pytest.fixture
def eventually():
    return _eventually

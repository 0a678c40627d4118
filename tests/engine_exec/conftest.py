import threading

import pytest
import torch
from engine_exec.drive_executor import children, wait_until
from tiny_models import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny Qwen3 in float32: its directory and the transformers model."""
    path = tmp_path_factory.mktemp("tiny")
    return path, write_tiny(path, "qwen3", dtype=torch.float32)


@pytest.fixture(scope="module")
def nothing_left():
    """At the end of the module no process is left that was not there before."""
    before = children()
    yield
    assert children() <= before


@pytest.fixture
def nothing_left_here():
    """The same for one test, its threads included."""
    before, threads = children(), set(threading.enumerate())
    yield
    assert children() <= before
    wait_until(lambda: set(threading.enumerate()) <= threads)

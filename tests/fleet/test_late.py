"""Members that are late with their part of an update."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout.errors import DeadlineExceeded
from rollout.fleet.late import results


@pytest.fixture
def hung():
    """A part that does not end by itself."""
    over = threading.Event()
    with ThreadPoolExecutor(8) as pool:

        def parts(**parts):
            parts = {"hung": lambda: over.wait(60), **parts}
            return {name: pool.submit(part) for name, part in parts.items()}

        yield parts
        over.set()


def test_who_is_later_than_enough_others_is_waited_for_a_while(hung):
    began = time.monotonic()
    found = results(hung(a=lambda: 1, b=lambda: 2), dict, 2, 0.4)
    assert 0.4 <= time.monotonic() - began < 30
    assert (found["a"], found["b"]) == (1, 2)
    assert isinstance(found["hung"], DeadlineExceeded)
    assert "member hung is waited for no more" in str(found["hung"])


def test_who_is_given_up_is_waited_for_no_more(hung):
    def fails():
        raise ValueError("its own")

    found = results(hung(a=lambda: 1, b=fails), lambda: {"hung": "it is gone"}, 3, 60.0)
    assert found["a"] == 1
    assert isinstance(found["b"], ValueError)
    assert "it is gone" in str(found["hung"])


def test_nobody_is_waited_for_once_it_is_over(hung):
    assert "hung" not in results(hung(), lambda: None, 1, 60.0)


def test_errors_of_others_are_no_reason_to_hurry():
    def slow():
        time.sleep(0.5)
        return 3

    def fails():
        raise ValueError("its own")

    with ThreadPoolExecutor(8) as pool:
        parts = {"a": pool.submit(slow), "b": pool.submit(fails)}
        found = results(parts, dict, 1, 0.0)
    assert found["a"] == 3

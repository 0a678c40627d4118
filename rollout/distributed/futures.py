"""Futures whose outcome is that of a call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def resolve(future: Future[T], call: Callable[[], T]) -> None:
    """Give ``future`` what ``call()`` returns or raises: an error belongs to who waits."""
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
        future.set_exception(error)
    finally:
        del future, call  # of which the error's traceback would make a cycle

"""gRPC does not survive a fork: who connects in a child of a process that uses it is told so."""

from __future__ import annotations

import os
import weakref
from typing import Any

from rollout.errors import EngineClosed


class Forks:
    """What of gRPC's is open in this process, and was when it was forked: none of it works in a
    child, nor does what that one opens beside it, which hangs or ends it by SIGSEGV.
    """

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Any] = weakref.WeakSet()  # channels and servers
        self._broken = False
        os.register_at_fork(after_in_child=self._forked)

    def check(self) -> None:
        if self._broken:
            raise EngineClosed(
                "this process was forked from one with an open connection or server of gRPC's, "
                "which does not survive a fork: spawn it, or fork it before the first connection"
            )

    def _forked(self) -> None:
        self._broken = self._broken or bool(self.open)


FORKS = Forks()

"""Sockets by which another process learns that this one has ended."""

from __future__ import annotations

import os
import socket
import weakref

_life_lines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_in_forks(sock: socket.socket) -> socket.socket:
    """``sock``, of which a forked process keeps no copy: it would hold the connection open for as
    long as it runs, also where its parent was killed.
    """
    _life_lines.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_life_lines):
        sock.close()


os.register_at_fork(after_in_child=_close_all)

"""The engine's end of one rank: its process, its socket, and the replies it owes."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch import Tensor

from rollout.distributed.child_environment import child_environment
from rollout.distributed.life_lines import closed_in_forks
from rollout.errors import RolloutError, from_wire
from rollout.wire.frames import Reply, recv_frame

_EXIT_WAIT = 1.0  # seconds for a rank whose socket closed to be reaped
_LOOK = 100  # milliseconds until a writer looks whether it was closed
_BLAME_WAIT = 0.5  # seconds in which a fatal error may turn out to be another rank's death

# Of a rank's environment, where the engine's says nothing.
COLLECTIVES = {
    # A broadcast that fails is reported by its error; torch would print C++ stack frames too.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # NCCL's watchdog would end the rank at a sender's silence; deadlines here abort the update.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
DEPRECATED = ("NCCL_ASYNC_ERROR_HANDLING",)  # the older name of that, which Ray sets


class RankLink:
    """A rank behind a socket. ``send`` never blocks; a thread reads replies into futures, and calls
    ``on_reply`` after each.

    ``on_end(why)`` is called once, from the reader thread, when the rank's process has ended
    or its socket broke. Whoever owns the link then fails what ``take_pending`` gives. ``process``
    is the rank's own, which ends with the link; None: it runs inside another program's.
    """

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        on_end: Callable[[str], None],
        on_reply: Callable[[], None],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.rank, self.process = rank, process
        self._sock = closed_in_forks(sock)
        self._on_end, self._on_reply = on_end, on_reply
        self._pending: dict[int, Future[Reply]] = {}
        self._pending_lock = threading.Lock()
        self._outbox = _Outbox(sock, f"rollout-writer-{rank}")
        self._last_error = ""
        self.blame = threading.Event()  # set once some rank is known to have died
        self._reader = threading.Thread(
            target=self._read, name=f"rollout-reader-{rank}", daemon=True
        )
        self._reader.start()

    @classmethod
    def start(
        cls,
        rank: int,
        settings: Mapping[str, str],
        on_end: Callable[[str], None],
        on_reply: Callable[[], None],
        inherited: Mapping[str, int | None],
    ) -> RankLink:
        """A rank in a process of its own. ``settings``: of its environment. ``inherited``:
        descriptors, by the option for each.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            passed = {name: fd for name, fd in inherited.items() if fd is not None}
            passed["--fd"] = theirs.fileno()
            options = [text for name, fd in passed.items() for text in (name, str(fd))]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollout.engine.worker", *options],
                pass_fds=tuple(passed.values()),
                stdin=subprocess.DEVNULL,
                stdout=2,  # libraries print there; this process's own output stays clean
                env=_environment(settings),
                process_group=0,  # Ctrl-C is the engine's affair, also while a rank still imports
            )
        return cls(rank, ours, on_end, on_reply, process)

    def expect(self, call_id: int, future: Future[Reply]) -> None:
        """The reply to that call resolves ``future``."""
        with self._pending_lock:
            self._pending[call_id] = future

    def send(self, buffers: list[Any]) -> None:
        """Queue one encoded frame."""
        self._outbox.put(buffers)

    def take_pending(self) -> list[Future[Reply]]:
        """Every future without a reply; the caller must resolve them."""
        with self._pending_lock:
            pending, self._pending = self._pending, {}
        return list(pending.values())

    def kill(self) -> None:
        """End the rank at once; one without a process of its own by its socket."""
        if self.process is None:
            self.hang_up()
        elif self.process.poll() is None:
            self.process.kill()

    def hang_up(self) -> None:
        """Close the life line: the rank's process ends by itself, and our threads too."""
        self._outbox.close()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was gone already

    def reap(self, timeout: float) -> None:
        """After ``hang_up``: wait for the process, kill it at the deadline, free everything."""
        if self.process is not None:
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(_EXIT_WAIT)
        self._outbox.join()
        self._sock.close()

    def resolve(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take one reply; a fatal error may wait a moment for another rank's death."""
        if "error" in header and header["internal"]:
            self._last_error = str(header["error"]["message"])
            if header["fatal"]:
                # Often a collective that broke because a peer died: let that be found first.
                self.blame.wait(_BLAME_WAIT)
                return  # the rank ends now: its future fails with the others
        with self._pending_lock:
            future = self._pending.pop(header["id"], None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if "error" in header:
            error = from_wire(header["error"])
            if trace := header.get("trace"):
                error.add_note(f"On rank {self.rank}, whose traceback is:\n{trace}")
            future.set_exception(error)
        else:
            future.set_result((header["reply"], tensors))

    def _read(self) -> None:
        why = ""
        try:
            while (frame := recv_frame(self._sock)) is not None:
                self.resolve(*frame)
                self._on_reply()
        except (RolloutError, OSError) as error:
            why = str(error)
        self._on_end(self._describe_end(why))

    def _describe_end(self, why: str) -> str:
        cause = f" after {self._last_error}" if self._last_error else ""
        if self.process is None:
            return f"rank {self.rank} has left{cause or (f' ({why})' if why else '')}"
        try:
            code = self.process.wait(_EXIT_WAIT)
        except subprocess.TimeoutExpired:
            how = f"lost its connection{f' ({why})' if why else ''}"
        else:
            how = f"ended {_exit_name(code)}"
        return f"rank {self.rank} (pid {self.process.pid}) {how}{cause}"


class _Outbox:
    """Writes frames in order without blocking the caller: at once where the socket takes them,
    else from a thread."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._queue: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def put(self, buffers: list[Any]) -> None:
        with self._changed:
            if self._closed:
                return
            views = [memoryview(b).cast("B") for b in buffers if len(b)]
            if not self._queue:
                views = self._send_now(views)
            if views:
                self._queue.extend(views)
                if self._thread.ident is None:
                    self._thread.start()
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(_EXIT_WAIT)

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        """What the socket would not take without waiting; the caller holds the lock."""
        try:
            sent = self._sock.sendmsg(views, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return views
        except OSError:
            return []  # the reader thread reports the end of the rank
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views and sent:
            views[0] = views[0][sent:]
        return views

    def _write(self) -> None:
        takes_more = select.poll()  # select knows no descriptor above 1023
        takes_more.register(self._sock, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                views = self._send_now([self._queue.popleft() for _ in range(len(self._queue))])
                self._queue.extendleft(reversed(views))
            if views:
                takes_more.poll(_LOOK)


def fail(future: Future[Reply], error: Exception) -> None:
    """Fail a future that another thread may have resolved or failed meanwhile."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The rank's environment, before anything is imported there.

    Threads that wait for the next parallel loop spin briefly instead of for ever: a trainer may run
    on the same cores.
    """
    env = child_environment(settings, COLLECTIVES)
    for name in DEPRECATED:
        env.pop(name, None)
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "20000")
    return env


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"

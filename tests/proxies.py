"""A TCP proxy in front of one port, which counts what passes and can cut connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading


class Proxy:
    """Forwards every connection to ``target`` ("host:port").

    ``cut_after``: bytes from the client, over all connections, behind which the connection that
    carries them is reset, once per entry. ``refusing``: whether new connections are dropped.
    ``lose``: what the first of the next requests begins with, whose reply is lost with its
    connection, one entry after the other; ``lost`` counts them. ``hold``: a partition. ``longest``:
    bytes of a piece; behind a longer one nothing of its connection's direction arrives any more, as
    where large packets are lost.
    """

    def __init__(self, target: str, cut_after: tuple[int, ...] = ()) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._cuts = list(cut_after)
        self.refusing = self.silent = False
        self.refuse_after_cut = False
        self.longest = 1 << 16
        self.up = self.down = self.cuts = self.lost = 0
        self.lose: list[bytes] = []
        self._flows = {up: threading.Event() for up in (True, False)}  # by direction
        self.go_on()
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, up: bool = True, down: bool = True) -> None:
        """Nothing arrives in these directions (``up``: at the target) until ``go_on``; then all
        does that was sent meanwhile, late, as behind a partition.
        """
        for flows, held in ((self._flows[True], up), (self._flows[False], down)):
            if held:
                flows.clear()

    def go_on(self) -> None:
        for flows in self._flows.values():
            flows.set()

    @property
    def num_open(self) -> int:
        """Connections that neither side has ended."""
        with self._lock:
            return sum(sock.fileno() >= 0 for sock in self._open) // 2

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            for sock in self._open:
                reset(sock)
            self._open.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.refusing:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody is there
                    reset(near)
                    continue
                with self._lock:
                    self._open += [near, far]
                losing = threading.Event()
                for pair in ((near, far, True, losing), (far, near, False, losing)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, up: bool, losing: threading.Event
    ) -> None:
        stuck = False
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                stuck = stuck or len(data) > self.longest
                if self.silent or stuck:
                    continue
                self._flows[up].wait()
                if up and self._counted(len(data)):
                    break
                if up and self.lose and data.startswith(self.lose[0]):
                    del self.lose[0]
                    losing.set()
                if not up and losing.is_set():
                    self.lost += 1
                    break
                self.down += 0 if up else len(data)
                sink.sendall(data)
        reset(source)
        reset(sink)

    def _counted(self, nbytes: int) -> bool:
        """Whether this piece is where the connection is cut; it is not passed on then."""
        with self._lock:
            self.up += nbytes
            if self._cuts and self.up >= self._cuts[0]:
                del self._cuts[0]
                self.cuts += 1
                self.refusing = self.refuse_after_cut
                return True
        return False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        # A blocked accept is woken by shutdown, not by close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.go_on()
        self.cut()


def reset(sock: socket.socket) -> None:
    """Close with RST, as a broken NAT entry or a dead peer does."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()

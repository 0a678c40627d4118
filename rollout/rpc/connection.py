"""The channels to one service: opened when first needed, with what every call carries."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from rollout.distributed.futures import resolve
from rollout.distributed.native_thread import NativeThread
from rollout.errors import ConfigError, EngineClosed, RequestAborted
from rollout.rpc.forks import FORKS
from rollout.rpc.status import CHANNEL_OPTIONS, error_from_rpc, is_typed
from rollout.rpc.tls import ClientTls
from rollout.wire.version import PROTOCOL_KEY, SOFTWARE_KEY, Speaks

R = TypeVar("R")
_AT_REST = frozenset(  # a channel without a connection, nor one that is being made for a call
    {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE}
)


def uninterrupted(call: Callable[[], R]) -> R:
    """``call()``, in a thread of its own where this is the one that Ctrl-C interrupts.

    An interrupt in the midst of gRPC's code leaves its channel locked, and whatever is asked over
    it next waits for good. What is interrupted here goes on by itself, within its own deadline.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    done: Future[R] = Future()
    try:
        NativeThread("rollout-rpc", lambda: resolve(done, call)).start()
    except RuntimeError:  # the interpreter ends: no thread can be started any more
        return call()
    return done.result()


class Connection:
    """To ``address`` ("host:port"): one ``grpc.aio`` channel for the running loop, and a blocking
    one for all threads. ``metadata``: what every call carries, its token among it. Where files of
    ``tls`` were renewed, another channel takes the calls that come.
    """

    def __init__(self, address: str, token: str | None, tls: ClientTls | None) -> None:
        if not isinstance(token, str | None) or not all("!" <= c <= "~" for c in token or ""):
            raise ConfigError("the token must be a text of visible ASCII characters without spaces")
        self.address = address
        self._files = None if tls is None else tls.credentials()
        self._options = (*CHANNEL_OPTIONS, *(() if tls is None else tls.options))
        bearer = (("authorization", f"Bearer {token}"),) if token else ()
        ours = Speaks.here()
        self.metadata = ((PROTOCOL_KEY, ours.range), (SOFTWARE_KEY, ours.software), *bearer)
        self._aio: tuple[asyncio.AbstractEventLoop, grpc.aio.Channel, Any] | None = None
        self._cuts = 0  # times that the loop's channel was seen to be unconnected
        self._sync: grpc.Channel | None = None
        self._shown: Any = None  # the credentials of that one
        self._older: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()  # blocking, with calls
        self._lock = threading.Lock()

    def ask(self, stub: Any, method: str, request: Any, timeout: float) -> Any:
        """A blocking call, which ends within ``timeout`` seconds."""
        channel = self.sync()
        try:
            with self.errors():
                call = getattr(stub(channel), method)
                return uninterrupted(lambda: call(request, timeout=timeout, metadata=self.metadata))
        except (RequestAborted, ValueError) as error:  # gRPC's words for a channel that is closed
            if not self.was_closed(channel):
                raise
            raise EngineClosed(self.closed_text) from error

    async def call(self, stub: Any, method: str, request: Any, timeout: float) -> Any:
        """As ``ask``, in the running loop."""
        with self.errors():
            call = getattr(stub(self.aio()), method)
            return await call(request, timeout=timeout, metadata=self.metadata)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """An error of the server, or of the way there, is raised as its own class."""
        try:
            yield
        except grpc.RpcError as error:
            # What the server said is all there is to it.
            cause = None if is_typed(error) else error
            raise error_from_rpc(error, self.address) from cause

    def aio(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._aio is None or self._aio[0] is not loop:
            shown = self._credentials()
            self._aio = loop, self._connected(grpc.aio, shown), shown
        _, channel, before = self._aio
        state = channel.get_state()
        if state is not grpc.ChannelConnectivity.READY:
            self._cuts += 1
        if state in _AT_REST and (shown := self._credentials()) is not before:
            channel = self._connected(grpc.aio, shown)
            self._aio = loop, channel, shown
        return channel

    def made(self) -> tuple[grpc.aio.Channel, int] | None:
        """Names the connection that the running loop has now, another one by another name; None
        where it has none. (All calls pass ``aio``, so that none is made anew unseen.)
        """
        channel, cuts = self.aio(), self._cuts
        return (channel, cuts) if channel.get_state() is grpc.ChannelConnectivity.READY else None

    def sync(self) -> grpc.Channel:
        with self._lock:
            shown = self._credentials()
            if self._sync is None or shown is not self._shown:
                if self._sync is not None:
                    self._older.add(self._sync)
                self._sync = uninterrupted(lambda: self._connected(grpc, shown))
                self._shown = shown
            return self._sync

    async def close_aio(self) -> None:
        """Of this loop; a later call opens a new one."""
        aio, self._aio = self._aio, None
        if aio is not None and aio[0] is asyncio.get_running_loop():
            await aio[1].close()
            FORKS.open.discard(aio[1])

    def was_closed(self, channel: grpc.Channel) -> bool:
        """Whether this process has closed it, by ``close_sync``, which ends its calls."""
        return self._sync is not channel and channel not in self._older

    @property
    def closed_text(self) -> str:
        return f"the connection to {self.address} was closed while the call ran"

    def close_sync(self) -> None:
        """A later call opens a new one."""
        with self._lock:
            channels = [*self._older, *([] if self._sync is None else [self._sync])]
            self._older, self._sync = weakref.WeakSet(), None
        for channel in channels:
            uninterrupted(channel.close)
            FORKS.open.discard(channel)

    def _credentials(self) -> Any:
        """Of a channel that is made now; None without TLS."""
        return None if self._files is None else self._files.newest()

    def _connected(self, library: Any, credentials: Any) -> Any:
        """A channel of ``grpc`` or ``grpc.aio``."""
        FORKS.check()
        if credentials is None:
            channel = library.insecure_channel(self.address, options=self._options)
        else:
            channel = library.secure_channel(self.address, credentials, options=self._options)
        FORKS.open.add(channel)
        return channel

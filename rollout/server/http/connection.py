"""HTTP connections of whomever: bounded memory before a token was looked at, and clients that
leave, or stay without a word.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16  # bytes of a request line and all fields, as h11 and nginx have it, about
GATHERED = 1 << 16  # bytes, about
GOODBYE = 0.2  # seconds for a client to answer the end of TLS: one that reads does so at once


class _Gathered:
    """A transport to which what is written in one turn of the loop goes at once: the events of a
    step's samples are many.

    Once a connection broke, the protocol is told in the next turn, and asyncio logs a warning for
    nearly each write until then.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []
        self._nbytes = 0

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        self._nbytes += len(data)
        if self._nbytes > GATHERED:  # the transport says when its reader is too slow
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts, self._nbytes = [], 0
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's faster protocol, whose parser takes fields of any number and length by itself:
    those before a body, and those behind one that comes in chunks. And its connections end when
    the server does.
    """

    _kept = 0  # bytes of this request's line and fields
    _unheard = 0  # bytes of which the parser has told nothing yet, nearly: what it may hold itself

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Gathered(transport, self.loop))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._unheard += len(data)
        super().data_received(data)
        if self._is_over and not self.transport.is_closing():
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._kept = self._unheard = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._keep(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._keep(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unheard = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        over = f"The request's line and headers are over {MAX_HEAD} bytes."
        super().send_400_response(over if self._is_over else msg)

    def shutdown(self) -> None:
        """An idle client never answers the end of TLS: it would hold up the server's own."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE, self._leave)

    def _leave(self) -> None:
        if not self.transport.get_write_buffer_size():  # else an answer is on its way
            self.transport.abort()

    def _keep(self, count: int) -> None:
        self._unheard = 0
        self._kept += count
        if self._is_over:
            raise ValueError("more than is kept of a request")  # which ends its parsing

    @property
    def _is_over(self) -> bool:
        return max(self._kept, self._unheard) > MAX_HEAD

"""Requests' heads in bounded memory: they are kept before anybody's token has been looked at."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16  # bytes of a request line and its headers, as h11 and nginx have it, about


class BoundedHead(HttpToolsProtocol):
    """uvicorn's faster protocol, whose parser takes heads of any length by itself."""

    _in_head = True
    _head = 0  # bytes that came of it, without the last ones

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head += len(data) if self._in_head else 0
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"Request line and headers are over {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        super().on_headers_complete()

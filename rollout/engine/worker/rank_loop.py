"""A rank's side of its socket: calls come in one order and run on the thread they belong to.

    reader thread --+-- stage_* --> staging thread --+--> replies, in any order,
       (socket)     +-- the rest -> main thread -----+    matched by the call's id
    shared memory ----- steps ----> main thread -----+--> theirs: back through the memory

Where steps are begun ahead (``async_scheduling``) a thread of its own replies to steps, while the
main thread begins the next one.
"""

from __future__ import annotations

import logging
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rollout.engine.steps.shared_payloads import PayloadViews
from rollout.engine.steps.step_ring import RankSteps
from rollout.engine.worker.call_queue import CallQueue
from rollout.engine.worker.job_thread import JobThread
from rollout.engine.worker.worker import Worker
from rollout.errors import RolloutError, TransferFailed, to_wire
from rollout.wire.frames import Frame, LostPayloadError, Reply, encode, recv_frame, send_frame

log = logging.getLogger(__name__)
MAX_TRACE = 8000  # characters of a traceback that travel: its end


class RankLoop:
    """Moves calls from the socket to the thread they belong to, and their replies back.

    ``end(status)`` is called, from any thread, when the engine has gone (0) or this rank must leave
    the others alone (1); where it returns, ``run`` does too. ``started`` is called once the rank
    can run steps.
    """

    def __init__(
        self,
        sock: socket.socket,
        worker: Worker,
        staging: JobThread,
        payloads: PayloadViews,
        replies: JobThread | None,
        steps: RankSteps | None,
        *,
        end: Callable[[int], object],
        started: Callable[[], object] = lambda: None,
    ) -> None:
        self._end, self._started = end, started
        self._sock, self._worker, self._staging = sock, worker, staging
        self._payloads, self._replies = payloads, replies
        self._steps, self._calls = steps, CallQueue(steps)
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Run the main thread's calls until the end, which the reader sees."""
        threading.Thread(target=self._read, name="rollout-reader", daemon=True).start()
        while (frame := self._calls.get()) is not None:
            try:
                frame = self._with_shared(frame)
            except LostPayloadError as error:
                self._lost(error)
            else:
                self._run(frame)

    def _leave(self, status: int) -> None:
        self._end(status)
        self._calls.end()

    def _read(self) -> None:
        try:
            while (frame := self._next()) is not None:
                if frame[0]["method"].startswith("stage_"):
                    self._staging.submit(_Job(self, frame))
                else:
                    self._calls.put(frame)
        except (RolloutError, OSError) as error:
            log.error("lost the engine: %s", error)
        self._leave(0)

    def _next(self) -> Frame | None:
        """The next call; None at the end. One whose tensors found no memory has failed already:
        its turn has no method."""
        while True:
            try:
                frame = recv_frame(self._sock)
                staged = frame is not None and frame[0]["method"].startswith("stage_")
                return self._with_shared(frame) if frame is not None and staged else frame
            except LostPayloadError as error:
                self._lost(error)
                if turn := error.header["turn"]:
                    return {"turn": turn, "method": ""}, {}

    def _with_shared(self, frame: Frame) -> Frame:
        """With the tensors that lie in memory beside it."""
        if rows := frame[0].get("shared"):
            try:
                frame[1].update(self._payloads.views(rows))
            except (OSError, ValueError):  # no room for the mapping
                nbytes = sum(nbytes for _, _, _, nbytes in rows.values())
                raise LostPayloadError(frame[0], nbytes) from None
        return frame

    def _lost(self, error: LostPayloadError) -> None:
        log.error("%s: %s", error.header["method"], error)
        told = to_wire(TransferFailed(f"rank {self._worker.rank}: {error}"))
        answer = {"id": error.header["id"], "error": told, "internal": False, "fatal": False}
        with self._send_lock:
            send_frame(self._sock, answer, {})

    def _run(self, frame: Frame) -> None:
        header, tensors = frame
        try:
            reply = self._worker.begin(header["method"], header["args"], tensors)
        except Exception as error:  # noqa: BLE001 - belongs to whoever called
            self._refuse(header, error)
            return
        if header["method"] == "init_kv":
            self._started()
        if self._replies is not None and header["method"] == "step":
            self._replies.submit(lambda: self._reply_or_end(header, reply))
        else:
            self._reply(header, reply)

    def _reply(self, header: dict[str, Any], reply: Callable[[], Reply]) -> None:
        try:
            values, tensors = reply()
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(header, error)
            return
        answer = {"id": header["id"], "reply": values}
        with self._send_lock:
            steps = self._steps if header["method"] == "step" else None
            if steps is None or not steps.reply(encode(answer, tensors)):
                send_frame(self._sock, answer, tensors)

    def _reply_or_end(self, header: dict[str, Any], reply: Callable[[], Reply]) -> None:
        """Beside the main thread, whose end would be this process's."""
        try:
            self._reply(header, reply)
        except BaseException:
            log.exception("a reply could not be sent")
            self._leave(1)

    def _refuse(self, header: dict[str, Any], error: Exception) -> None:
        internal = not isinstance(error, RolloutError)
        if internal:
            log.error("%s failed", header["method"], exc_info=error)
        # Other ranks may be inside this step's collectives: they are freed by our end alone.
        fatal = internal and header["method"] == "step" and self._worker.size > 1
        told = to_wire(error)
        if (internal and not fatal) or header["method"] == "start":
            told["message"] = f"rank {self._worker.rank}: {told['message']}"
        answer = {
            "id": header["id"],
            "error": told,
            "trace": "".join(traceback.format_exception(error))[-MAX_TRACE:],
            "internal": internal,
            "fatal": fatal,
        }
        with self._send_lock:
            send_frame(self._sock, answer, {})
        if fatal:
            self._leave(1)


class _Job:
    """One call for the staging thread; kept small, so that its tensors go when it is done."""

    def __init__(self, loop: RankLoop, frame: Frame) -> None:
        self._loop, self._frame = loop, frame

    def __call__(self) -> None:
        self._loop._run(self._frame)

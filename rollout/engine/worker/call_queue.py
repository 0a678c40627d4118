"""The calls of a rank's main thread, in their one order, by whichever way each comes."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from rollout.engine.steps.step_ring import RankSteps
from rollout.wire.frames import Frame


class CallQueue:
    """``put`` and ``end`` from any thread, ``get`` in the main one.

    Without ``steps`` all calls are put here by the thread that reads the socket. With them it puts
    some, whose ``turn`` says when, and the others are taken from the memory without a thread
    between.
    """

    def __init__(self, steps: RankSteps | None) -> None:
        self._steps = steps
        self._put: SimpleQueue[Frame | None] = SimpleQueue()
        self._next: Frame | None = None  # of those that were put
        self._turn = 1

    def put(self, frame: Frame) -> None:
        """A call with a method; one with none is passed over, when its turn comes."""
        self._wake(frame)

    def end(self) -> None:
        self._wake(None)

    def get(self) -> Frame | None:
        """The next call, waiting for it; None at the end."""
        while (frame := self._any()) is not None:
            self._turn += 1
            if frame[0]["method"]:
                return frame
        return None

    def _wake(self, frame: Frame | None) -> None:
        self._put.put(frame)
        if self._steps is not None:
            self._steps.wake()

    def _any(self) -> Frame | None:
        steps = self._steps
        if steps is None:
            return self._put.get()
        while True:
            rung = steps.rung
            frame = steps.take(self._turn)
            if frame is not None:
                return frame
            if self._next is None:
                try:
                    self._next = self._put.get_nowait()
                except Empty:
                    steps.wait(rung)
                    continue
                if self._next is None:
                    return None
            if self._next[0]["turn"] == self._turn:
                frame, self._next = self._next, None
                return frame
            steps.wait(rung)

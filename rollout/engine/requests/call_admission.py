"""How a call gets from the thread of its caller into the engine's: as a whole, or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future

from rollout.engine.requests.input_processor import InputProcessor
from rollout.engine.requests.output import OutputProcessor
from rollout.engine.requests.request_state import Call, RequestState, Sink
from rollout.errors import EngineError, RolloutError
from rollout.generation import Request

log = logging.getLogger(__name__)


class CallAdmission:
    """``refusal``: why no request can be taken now, if so. ``at_boundary`` runs a function in the
    engine's thread, between two steps; ``took_on`` hears there of what was queued.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        refusal: Callable[[], RolloutError | None],
        at_boundary: Callable[[Callable[[], None]], Future[None]],
        took_on: Callable[[list[RequestState]], None],
    ) -> None:
        self._inputs, self._outputs, self._took_on = inputs, outputs, took_on
        self._refusal, self._at_boundary = refusal, at_boundary

    def take(
        self, requests: Sequence[Request], sink: Sink, *, stream: bool, aborted: Set[str]
    ) -> None:
        """Judge ``requests`` here, raising for all of them, and queue them at the next boundary;
        those that are ``aborted`` by then end there.
        """
        requests = self._inputs.with_bad_words(requests)
        call = Call(sink, stream, set(self._inputs.take(requests)), aborted)
        arrived = time.monotonic()
        admitted = self._at_boundary(lambda: self._admit(requests, call, arrived))
        admitted.add_done_callback(lambda future: self._not_admitted(future, requests, call))

    def _admit(self, requests: Sequence[Request], call: Call, arrived: float) -> None:
        """In the engine's thread: queue the whole call, or end it if it can no longer be served."""
        try:
            with self._inputs.handing_over(requests):
                refusal = None if call.open <= call.aborted else self._refusal()
                if refusal is None:
                    states = self._inputs.build(requests, call, arrived)
                    self._outputs.add(states)
                    self._outputs.abort(list(call.aborted))
                    if left := [state for state in states if state.num_open]:
                        self._took_on(left)
        except RolloutError as error:  # an adapter that was unloaded since the call was judged
            refusal = error
        except Exception as error:
            log.exception("a call could not be admitted")
            text = f"the call could not be admitted: {type(error).__name__}: {error}"
            refusal = EngineError(text)
        if refusal is not None:
            self._outputs.refuse(call, refusal)

    def _not_admitted(self, asked: Future[None], requests: Sequence[Request], call: Call) -> None:
        """Tell a call that the engine's thread never got to why."""
        error = asked.exception()
        if error is not None:
            with self._inputs.handing_over(requests):
                pass
            self._outputs.refuse(call, error)
